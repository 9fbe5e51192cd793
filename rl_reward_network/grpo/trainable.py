"""The tensors that GRPO trains: LoRA and those with a gradient. All others are frozen and checked for changes."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rl_reward_network.grpo.settings import check_lora_dropout
from rl_reward_network.models.lora import freeze_parameters, setup_lora
from rl_reward_network.models.sa2va.side_network import SideNetworkConfig

CANDIDATE_HEADS = "grounding_encoder.mask_decoder.output_hypernetworks_mlps."
ATTENTION_DROPOUT = ("attention_dropout", "dropout_p")  # attributes of attention layers in transformers
SELECTABLE = ("1", "2", "3")  # 0 is the head of the single mask, which Sa2VA never uses


def prepare_model(
    model: Any,
    r: int,
    lora_alpha: int,
    lora_dropout: float = 0.0,
    freeze_embeddings: bool = False,
    side_network: SideNetworkConfig | None = None,
    encoder: Mapping[str, Any] | None = None,
) -> None:
    """Put LoRA on a loaded Sa2VA, freeze all but what its family trains, and make trainable tensors float32.

    `freeze_embeddings` also freezes token embeddings and head, which a Qwen-VL trains. A `side_network` is added where
    the model has none; one that is there trains, too. `encoder` says what trains of SAM 2's image encoder, as
    `GRPOPlan` has it.

    Raises:
        ValueError: dropout is not 0, or `setup_lora` refuses.
    """
    check_lora_dropout(lora_dropout)
    _keep_unpacked(model)
    setup_lora(model, r, lora_alpha, 0.0, None if encoder is None else encoder.get("lora_r"))
    if side_network is not None:
        model.add_side_network(side_network)
    _no_dropout(model)
    freeze_parameters(model, freeze_embeddings, encoder is not None and encoder["train"] == "full")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # steps of RL size would round away in bfloat16


def _keep_unpacked(model: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights at a prediction on the CPU: packed ones have no backward pass."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def _no_dropout(model: nn.Module) -> None:
    """Turn off all dropout, also that which a checkpoint's configuration sets inside attention."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ATTENTION_DROPOUT:
            if hasattr(module, name):
                setattr(module, name, 0.0)


def mixed_precision(model: Any) -> AbstractContextManager[Any]:
    """Autocast if frozen weights are bfloat16 and trainable ones float32; nothing for a float32 model."""
    return torch.autocast(model.device.type, torch.bfloat16) if model.dtype == torch.bfloat16 else nullcontext()


def unreached_of_candidates(unreached: Sequence[str], reached: Collection[str]) -> list[str]:
    """The unreached tensors without those of a selectable candidate's head if another candidate's is reached.

    A mask depends only on the candidate that SAM 2 selects for it, so such a head may be reached by other prompts.
    """
    return [name for name in unreached if not _same_tensor_of_candidates(name) & set(reached)]


def freeze(model: nn.Module, names: Sequence[str]) -> None:
    """Freeze the named parameters."""
    for name in names:
        model.get_parameter(name).requires_grad_(False)


def _same_tensor_of_candidates(name: str) -> set[str]:
    """For a tensor of a selectable candidate's head its counterparts in all such heads; otherwise empty."""
    before, heads, behind = name.partition(CANDIDATE_HEADS)
    number, _, rest = behind.partition(".")
    if not heads or number not in SELECTABLE:
        return set()
    return {f"{before}{heads}{other}.{rest}" for other in SELECTABLE}


def digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of the bytes of each trainable parameter; of a frozen one, often gigabytes, the XOR of its words."""
    return {
        name: _sha256(parameter) if parameter.requires_grad else _xor(parameter)
        for name, parameter in model.named_parameters()
    }


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes(tensor).cpu().numpy().tobytes()).hexdigest()


def _xor(tensor: Tensor) -> str:
    """It changes with every bit, and is computed where the tensor is, thirteen times as fast."""
    flat = _bytes(tensor)
    words = flat.view(torch.int64) if len(flat) % 8 == 0 else flat
    return str(torch.hash_tensor(words).view(torch.int64).item())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def check_movement(before: dict[str, str], after: dict[str, str], training: Collection[str]) -> list[str]:
    """Names of trainable tensors that did not change, in the model's order.

    Args:
        before, after: digests.
        training: names of the trainable tensors.

    Raises:
        ValueError: a frozen tensor changed, if only by one bit; names the tensors.
    """
    same = {name for name, digest in before.items() if after.get(name) == digest}
    if changed := [name for name in before if name not in same and name not in training]:
        raise ValueError(f"{len(changed)} frozen tensors changed in training, first {changed[:3]}; this is a bug")
    return [name for name in before if name in same and name in training]


def unmoved_reasons(
    unmoved: Sequence[str], with_gradient: Collection[str], steps: int, learning_rate: float
) -> dict[str, list[str]]:
    """Reason -> the tensors that did not change for it.

    Args:
        unmoved: result of `check_movement`.
        with_gradient: names of tensors that had a gradient at some step.
        steps, learning_rate: optimisation steps, and the largest rate of one.
    """
    reasons: dict[str, list[str]] = {}
    for name in unmoved:
        if not learning_rate:
            reason = "learning_rate is 0"
        elif name in with_gradient:
            reason = "its steps were too small for float32: raise the learning rate"
        elif "lora_A" in name and steps == 1:
            reason = "its gradient passes lora_B, which began at 0; train for more than one step"
        else:
            reason = f"no loss reached it in {steps} steps"
        reasons.setdefault(reason, []).append(name)
    return reasons
