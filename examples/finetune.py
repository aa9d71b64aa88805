"""Fine-tune a language model whose layers have embeddings of their own: its tables whole, by rows, and LoRA on the rest.

    pip install transformers peft accelerate
    python examples/finetune.py --output tuned

The model has the form of Gemma 3n, small and with random weights; for yours, load it in `make`. It is trained by transformers'
Trainer on a text of random words. Beside each of the Trainer's checkpoints a callback saves the table: PEFT leaves it out of
them, unless it is among `modules_to_save`, and then is there twice. `--resume` goes on from the last.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig, Trainer, TrainerCallback, TrainingArguments

import speedtransfer as st

TABLE, WORDS, STEPS = "embed_tokens_per_layer", 50_000, 20


def make(words: int, layers: int = 4, width: int = 32) -> nn.Module:
    """Return a model with `width` / 4 numbers for each of `words` in each layer."""
    torch.manual_seed(0)
    config = Gemma3nTextConfig(
        vocab_size=words,
        vocab_size_per_layer_input=words,
        hidden_size=width,
        hidden_size_per_layer_input=width // 4,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=width // 2,
        num_kv_shared_layers=layers // 2,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        activation_sparsity_pattern=[0.0] * layers,
    )
    model = Gemma3nForCausalLM(config)
    # In a new model, unlike one that has been trained, these are zero, and so is what the embeddings of the layers do.
    for layer in model.model.layers:
        nn.init.ones_(layer.altup.correct_output_scale)
    return model


def adapt(model: nn.Module) -> nn.Module:
    """Return the model with adapters; they and the table are trained."""
    found = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    found.get_submodule(f"base_model.model.model.{TABLE}").weight.requires_grad_(True)
    return found


class SavedTable(TrainerCallback):
    """Saves a table beside each checkpoint of the Trainer."""

    def __init__(self, table: nn.Module) -> None:
        self.table = table

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **others: Any) -> None:
        """Save it: the checkpoint is whole then."""
        st.save_checkpoint(f"{args.output_dir}/checkpoint-{state.global_step}/table", self.table)


def tune(
    model: nn.Module, table: nn.Module, data: list[dict[str, torch.Tensor]], output: str, resume: bool, **more: Any
) -> int:
    """Train the model, from the last checkpoint in `output` on if it is to `resume`; return how many steps were made."""
    arguments = TrainingArguments(
        output_dir=output, per_device_train_batch_size=4, learning_rate=1e-2, report_to="none", seed=0, **more
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[SavedTable(table)])
    whole = sorted(Path(output).glob("checkpoint-*/table"), key=lambda path: int(path.parent.name.split("-")[1]))
    last = whole[-1].parent if resume and whole else None
    if last is not None:
        st.load_checkpoint(last / "table", table)
    trainer.train(resume_from_checkpoint=last and str(last))
    return trainer.state.global_step - (int(last.name.split("-")[1]) if last else 0)


def main() -> None:
    """Tune, and print what the tables take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="tuned", help="folder of the checkpoints")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    model = make(WORDS)
    print(st.replace_embeddings(model, names=f"*{TABLE}", memory="auto"))
    table = model.model.get_submodule(TABLE)
    text = torch.randint(WORDS, (256, 32), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in text]
    steps: dict[str, Any] = {"max_steps": STEPS, "save_steps": STEPS // 2, "logging_steps": 5}
    table.table.reset_stats()
    made = tune(adapt(model), table, data, given.output, given.resume, **steps)
    size, stats = table.weight.numel() * table.weight.element_size(), table.table.stats()
    moved = stats.gathered_bytes / max(made, 1)
    print(f"the table, its gradient and AdamW's state: {4 * size / 1e6:.1f} MB on the device with torch.nn.Embedding")
    print(
        f"here {3 * size / 1e6:.1f} MB in the memory of the host, of which a step takes {moved / 1e6:.2f} MB to the device"
    )


if __name__ == "__main__":
    main()
