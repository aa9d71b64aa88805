"""How `make notebooks` runs notebooks and writes their outputs into them: small, and the same on every machine."""

c = get_config()  # noqa: F821
c.NbConvertApp.export_format = "notebook"
c.NbConvertApp.use_output_suffix = False  # in place
c.FilesWriter.build_directory = ""

c.ExecutePreprocessor.enabled = True
c.ExecutePreprocessor.timeout = 600
c.ExecutePreprocessor.kernel_name = "python3"
c.ExecutePreprocessor.record_timing = False
c.ExecutePreprocessor.extra_arguments = ["--IPKernelApp.log_level=ERROR", "--InteractiveShell.colors=nocolor"]

# "mystnb" is what the site says of a picture.
c.ClearMetadataPreprocessor.enabled = True
c.ClearMetadataPreprocessor.preserve_cell_metadata_mask = {"mystnb"}
c.ClearMetadataPreprocessor.preserve_nb_metadata_mask = {"kernelspec", ("language_info", "name")}
