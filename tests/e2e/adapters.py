"""Two small LoRA adapters for the CPU model, made at random."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

NAMES = ("tuned-a", "tuned-b")
ADMIN_KEY = "for-tests"
RANK, SCALE = 8, 0.1


def made(directory: Path, model: Path) -> dict[str, str]:
    """Make an adapter for each of `NAMES`; its folder, by name. `model`: the checkpoint."""
    shape = json.loads((model / "config.json").read_text())
    return {name: str(_made(directory / name, shape, seed)) for seed, name in enumerate(NAMES)}


def _made(folder: Path, shape: dict[str, int], seed: int) -> Path:
    hidden = shape["hidden_size"]
    values = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    chance = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(shape["num_hidden_layers"]):
        for module, outputs in (("q_proj", hidden), ("v_proj", values)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=chance) * SCALE
            weights[f"{name}.lora_B.weight"] = torch.randn(outputs, RANK, generator=chance) * SCALE
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"bias": "none"}))
    return folder
