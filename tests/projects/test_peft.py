"""PEFT's adapters beside tables: trained whole, saved with the adapter, or some of their rows; by transformers' Trainer."""

import sys
from pathlib import Path

import pytest
import torch
from cases import take_step

import speedtransfer as st
from projects.pairs import DENSE, TOLERANCE, Outcome, compare, hand_over, in_float64

pytestmark = pytest.mark.slow
pytest.importorskip("peft", reason="PEFT is not installed: make projects")
gemma = pytest.importorskip("projects.test_transformers", reason="transformers is not installed: make projects")

# Its embeddings are of a class of its own, in whose place there is none of ours.
WAY = "replace"
TABLE = "embed_tokens_per_layer"
FORMS = {
    "frozen": {},
    "trained": {},
    "saved": {"modules_to_save": [TABLE]},
    "some rows": {"trainable_token_indices": {TABLE: [5, 7, 9, 30]}},
}


def made(way):
    return hand_over(gemma.gemma(torch.get_default_dtype()), way)


def adapted(way, form):
    from peft import LoraConfig, get_peft_model

    model = made(way)
    torch.manual_seed(1)
    found = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **FORMS[form]))
    if form == "trained":
        model.model.embed_tokens_per_layer.weight.requires_grad_(True)
    return found


def tuned(way, form, folder, options):
    from transformers import Trainer, TrainingArguments

    draw = torch.Generator().manual_seed(0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(3, gemma.VOCABULARY, (24, 9), generator=draw)]
    about = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "seed": 3, "logging_steps": 1, "save_steps": 3}
    settings = {**about, "per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, **dict(options)}

    def trainer():
        arguments = TrainingArguments(output_dir=f"{folder}/{way}-{form}", **settings)
        return Trainer(model=adapted(way, form), args=arguments, train_dataset=data)

    whole = trainer()
    weights = dict(whole.model.named_parameters())
    (weight,) = (weights[n] for n in weights if TABLE in n and n.endswith("weight") and "original" not in n)
    before = weight.detach().clone()
    whole.train()
    assert torch.equal(weight, before) is (form in ("frozen", "some rows")), "whether the table takes part"
    history = whole.state.log_history
    printed = {name: [entry[name] for entry in history if name in entry] for name in ("loss", "grad_norm")}
    resumed = {}
    if form in ("saved", "some rows"):
        again = trainer()
        again.train(resume_from_checkpoint=f"{folder}/{way}-{form}/checkpoint-3")
        resumed = {"resumed": again.predict(data[:4]).predictions[0]}
    return Outcome(printed, {"logits": whole.predict(data[:4]).predictions[0], **resumed}, whole.model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("double", "options"),
    [(True, {}), (True, {"gradient_accumulation_steps": 2, "weight_decay": 0.1}), (False, {"bf16": True})],
    ids=["float64", "accumulated", "bf16"],
)
def test_adapters(form, options, double, tmp_path):
    compare(tuned, WAY, double, form, tmp_path, (*options.items(),))


@pytest.mark.parametrize("form", ["saved", "some rows"])
def test_an_adapter_is_loaded_beside_tables_and_without(form, tmp_path):
    from peft import PeftModel

    ids = torch.arange(3, 12)[None]
    with in_float64():
        for way, other in ((WAY, DENSE), (DENSE, WAY)):
            model = adapted(way, form).train()
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
            for _ in range(3):
                take_step(optimizer, model(input_ids=ids, labels=ids).loss)
            model.eval().save_pretrained(tmp_path / way)
            loaded = PeftModel.from_pretrained(made(other), tmp_path / way).eval()
            with torch.no_grad():
                expected = model(input_ids=ids).logits
                torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=0, atol=TOLERANCE)
                merged = loaded.merge_and_unload()
                torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=0, atol=TOLERANCE)


def test_the_example_goes_on_from_its_last_whole_checkpoint(tmp_path):
    sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
    import finetune

    text = torch.randint(300, (64, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in text]

    def run(way, resume=False):
        model = finetune.make(300).double()
        if way != DENSE:
            assert st.replace_embeddings(model, min_rows=0, names=f"*{TABLE}") == [f"model.{TABLE}"]
        table = model.model.get_submodule(TABLE)
        options = {"max_steps": 9, "save_steps": 3, "disable_tqdm": True, "use_cpu": True}
        made = finetune.tune(finetune.adapt(model), table, data, str(tmp_path / way), resume, **options)
        return made, table.weight.detach().clone()

    made, whole = run(WAY)
    (tmp_path / WAY / "checkpoint-9" / "table").rename(tmp_path / "apart")
    again, resumed = run(WAY, resume=True)
    assert (made, again) == (9, 3)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(run(DENSE)[1], whole, rtol=0, atol=1e-12)
    assert (whole - finetune.make(300).double().model.get_submodule(TABLE).weight).abs().max() > 0.01
