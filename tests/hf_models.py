"""Tiny random Hugging Face models, and the checkpoint folders that hold them: the ground of the parity tests."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the oracle is Hugging Face transformers on torch")
transformers = pytest.importorskip("transformers", reason="the oracle is Hugging Face transformers")
tensor_files = pytest.importorskip("safetensors.torch")

# The models are so small that threads only wait for each other.
torch.set_num_threads(1)

VOCAB = 101
# Odd and non-square: heads x head_dim differs from the width, value heads outnumber key heads, dk differs from dv.
_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=44,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
)
_ROPE = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25)
_HYBRID = dict(
    **_COMMON,
    num_hidden_layers=8,
    head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=10,
    linear_value_head_dim=14,
)
_EXPERTS = dict(num_experts=7, num_experts_per_tok=3, moe_intermediate_size=18, shared_expert_intermediate_size=26)
_MROPE = dict(mrope_section=[1, 1, 1], mrope_interleaved=True)
_FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3_5": dict(**_HYBRID, intermediate_size=57, rope_parameters={**_ROPE, **_MROPE}),
    "Qwen3_5Moe": dict(**_HYBRID, **_EXPERTS, rope_parameters={**_ROPE, **_MROPE}),
    "Qwen3Next": dict(**_HYBRID, **_EXPERTS, rope_parameters=_ROPE),
    "NemotronH": dict(
        **_COMMON,
        layers_block_type=None,
        hybrid_override_pattern="MEM*EMEM*EM-ME",
        head_dim=12,
        mamba_num_heads=6,
        mamba_head_dim=14,
        ssm_state_size=10,
        n_groups=3,
        chunk_size=16,
        time_step_min=1e-9,
        intermediate_size=57,
        n_routed_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=18,
        moe_shared_expert_intermediate_size=26,
        moe_latent_size=22,
        routed_scaling_factor=2.5,
    ),
    "Qwen2": dict(**(_COMMON | dict(hidden_size=60)), num_hidden_layers=3, intermediate_size=57),
    "Llama": dict(**(_COMMON | dict(hidden_size=66)), num_hidden_layers=3, intermediate_size=57, head_dim=14),
}


def tiny_config(family: str, **changes: Any) -> Any:
    """The family's text config, small; ``changes`` replace its fields."""
    name = f"{family}TextConfig" if family.startswith("Qwen3_5") else f"{family}Config"
    return getattr(transformers, name)(
        **(_FAMILIES[family] | changes), attn_implementation="eager", experts_implementation="eager", dtype="float32"
    )


def tiny_model(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A float32 ``{family}ForCausalLM`` whose every weight, norms and biases too, is random."""
    model = getattr(transformers, f"{family}ForCausalLM")(tiny_config(family, **changes)).float().eval()
    return randomize(model, seed)


def randomize(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Draws every parameter: matrices by their fan-in; norms, biases and decay rates around their neutral values."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = _draw(name, parameter.detach(), noise)
        parameter.requires_grad_(False)
    for name, buffer in module.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return module


def _draw(name: str, neutral: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith("A_log"):
        return 0.5 * noise - 2.0  # The memory of a few dozen tokens, so that long prompts try it.
    if name.endswith("dt_bias"):
        return noise - 1.0
    if name.endswith("bias") or "norm" in name:
        return neutral + 0.3 * noise
    if name.endswith(".D"):
        return neutral + 0.5 * noise
    if "embed" in name:
        return 0.3 * noise
    fan_in = noise / noise.shape[-1] ** 0.5
    # Blocks that outweigh the stream they add to make a chaotic model, in which rounding alone exceeds any tolerance.
    return 0.1 * fan_in if re.search(r"(out|o|down)_proj", name) else fan_in


@torch.no_grad()
def hf_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of tokens [B, T]."""
    return model(torch.tensor(tokens)).logits.numpy()


@torch.no_grad()
def hf_greedy(model: Any, prompts: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """``generate``'s next ``count`` tokens [B, count] after prompts [B, T], with its cache.

    Also the lead of each token's logit over the runner-up's.
    """
    out = model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(prompts.shape, dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits, dim=1).topk(2).values
    return out.sequences[:, prompts.shape[1] :].numpy(), (best[..., 0] - best[..., 1]).numpy()


def save_checkpoint(
    model: Any,
    folder: Path,
    *,
    mtp: torch.nn.Module | None = None,
    packed: bool = False,
    nested: bool = False,
    old_rope: bool = False,
) -> Path:
    """Writes a checkpoint folder; ``mtp`` holds the draft head under the names it has on disk.

    ``packed`` keeps the experts of a layer in one tensor, as the released Qwen3.5 weights do; otherwise each expert has
    its own, which is how Hugging Face saves them. ``nested`` is the multimodal layout: ``text_config``, a
    ``language_model.`` prefix and a vision tower. ``old_rope`` writes ``rope_theta`` and ``rope_scaling`` apart, as
    before transformers 5.
    """
    model.save_pretrained(folder)
    tensors = tensor_files.load_file(folder / "model.safetensors")
    if packed:
        tied = model.config.tie_word_embeddings
        tensors = {name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    if nested:
        tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
        tensors["model.visual.patch_embed.proj.weight"] = torch.ones(3, 5)
    if mtp is not None:
        head = mtp.state_dict() if packed else _one_tensor_an_expert(mtp.state_dict())
        tensors |= {f"mtp.{name}": value for name, value in head.items()}
    tensors = {name: value.contiguous().clone() for name, value in tensors.items()}
    tensor_files.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_config(model, folder, has_mtp=mtp is not None, nested=nested, old_rope=old_rope)
    return folder


def _one_tensor_an_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    split: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|up_proj|down_proj)", name)
        if match is None:
            split[name] = value
            continue
        kinds = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else (match[2],)
        for expert, matrices in enumerate(value):
            for kind, matrix in zip(kinds, matrices.chunk(len(kinds)), strict=True):
                split[f"{match[1]}.{expert}.{kind}.weight"] = matrix
    return split


def _write_config(model: Any, folder: Path, *, has_mtp: bool, nested: bool, old_rope: bool) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if has_mtp:
        config["num_nextn_predict_layers" if config["model_type"] == "nemotron_h" else "mtp_num_hidden_layers"] = 1
    if old_rope:
        rope = config.pop("rope_parameters")
        config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    if nested:
        kind = config["model_type"].removesuffix("_text")
        config = {
            "architectures": [config["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")],
            "model_type": kind,
            "text_config": config,
            "tie_word_embeddings": config["tie_word_embeddings"],
            "vision_config": {"model_type": f"{kind}_vision", "depth": 1},
        }
    path.write_text(json.dumps(config))
