"""Build and installation of speedtransfer: the version ranges that users get (constraints.txt pins what we develop with)."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "speedtransfer/version.py").read_text()).group(1)

PLOT = ["matplotlib>=3.8"]
TENSORBOARD = ["tensorboard>=2.15"]
NOTEBOOKS = ["ipykernel>=6.29", "nbclient>=0.10", "nbformat>=5.9", "pillow>=10"]
DOCS = ["furo>=2024.8", "myst-nb>=1.2", "sphinx>=8"]
OPTIMIZERS = [
    "lion-pytorch",
    "pytorch-optimizer>=4",
    "schedulefree>=1.4",
    "torch-optimizer",
]  # swept by `make optimizers`
DEV = [
    "gensim>=4.3",  # the reader whose word2vec formats ours must satisfy
    "hypothesis>=6.100",
    "mypy>=1.10",
    "nvidia-cuda-nvrtc>=13.0",  # compiles the kernels in the tests; needs no driver
    "expecttest>=0.2",  # torch.testing._internal imports it; its module database drives a test
    "psutil>=5.9",
    "pytest>=8",
    "pytest-benchmark>=4",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "ruff>=0.6",
    "scikit-learn>=1.4",  # judges the vectors of bench/node2vec.py
]

setup(
    name="speedtransfer",
    version=VERSION,
    description="Embedding tables larger than GPU memory, trained with any row-by-row torch.optim optimizer",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="speedtransfer developers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: Microsoft :: Windows",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    # With this, `pip install -e .` puts the folder on the path, where type checkers find the package.
    package_dir={"": "."},
    packages=find_packages(include=["speedtransfer", "speedtransfer.*"]),
    package_data={
        "speedtransfer": ["py.typed"],
        "speedtransfer.kernels": ["*.cu", "*.cuh"],
        "speedtransfer.planning": ["*.yaml"],
        "speedtransfer.word2vec": ["corpora/*"],
    },
    install_requires=[
        "numba>=0.60",  # compiled loops on the host; everything runs without it too, slower
        "numpy>=2",
        "pyyaml>=6",  # files of machines and of prices; imported when one is read
        "rich>=13",
        "safetensors>=0.4.3",
        "tomli>=2; python_version < '3.11'",
        "torch>=2.6",
        "typer>=0.12.4",  # earlier ones do not know `Path | None`
        "typing_extensions>=4.6",
    ],
    extras_require={
        # ctk: the compiler and headers of CUDA, which the kernels need and a driver does not bring.
        "cuda12": ["cupy-cuda12x[ctk]>=13.6"],
        "cuda13": ["cupy-cuda13x[ctk]>=13.6"],
        "fast": [],  # it brought numba, which now comes by itself
        "plot": PLOT,
        "tensorboard": TENSORBOARD,
        "notebooks": NOTEBOOKS + PLOT,
        "docs": DOCS,
        "optimizers": OPTIMIZERS,
        "dev": DEV + PLOT + TENSORBOARD + NOTEBOOKS + DOCS,
    },
    entry_points={"console_scripts": ["speedtransfer=speedtransfer.__main__:main"]},
)
