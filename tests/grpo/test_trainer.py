"""The trainer: what moves and what does not, the reference, reused rollouts, resuming, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.grpo.checkpoint import save_run_state
from rl_reward_network.grpo.measure import measure
from rl_reward_network.grpo.rollouts.rewards import Reward
from rl_reward_network.grpo.setup import check_movement, digests, freeze_unreached
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.models.lora import lora_off
from rl_reward_network.rewards.functions import iou_reward
from tests.grpo.nano import config, nano, regions, rewards, shake, trainer


def weights(own: Sa2VAGRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in own.sa2va.named_parameters() if p.requires_grad}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], tolerance: float = 0) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], atol=tolerance, rtol=0, msg=name)


def test_a_run_moves_what_trains_and_nothing_else(tmp_path: Path) -> None:
    own = trainer(tmp_path, caption=1.0, loop2_iou=1.0)
    before, start = digests(own.sa2va), weights(own)
    own.train()
    assert len(start) > 20
    assert check_movement(before, digests(own.sa2va), start) == []
    assert own.ema is not None
    assert own.ema.steps == 2
    assert 0 < own.ema.distance(own.sa2va) < sum(float((t - start[n]).norm()) for n, t in weights(own).items())


def test_equal_seeds_give_equal_runs_and_lr_0_none(tmp_path: Path) -> None:
    first, again, still = (trainer(tmp_path / str(n), learning_rate=lr) for n, lr in enumerate((1e-3, 1e-3, 0.0)))
    start = weights(still)
    for own in (first, again, still):
        own.train()
    assert_equal(weights(first), weights(again))
    assert first.state.log_history[0]["loop1/reward_mean"] == again.state.log_history[0]["loop1/reward_mean"]
    assert_equal(weights(still), start)


def test_the_reference_is_the_model_as_it_was_at_every_step(tmp_path: Path) -> None:
    own = trainer(tmp_path)
    groups, _ = own.maker.sample(regions()[:2], (0, 0, 0))
    with torch.no_grad():
        start = [output.detached() for output in own._policy(groups)[0]]
    own.train()
    with torch.no_grad():
        now = own._policy(groups)[0]
        with own.as_reference():
            reference = own._policy(groups)[0]
    for before, same, after in zip(start, reference, now, strict=True):
        torch.testing.assert_close(before.log_probs, same.log_probs, atol=1e-6, rtol=0)
        torch.testing.assert_close(before.parameters, same.parameters, atol=1e-6, rtol=0)
        assert not torch.equal(before.log_probs, after.log_probs)


def test_lora_off_adds_nothing_and_leaves_what_trains(tmp_path: Path) -> None:
    model, _ = nano()
    ids = torch.arange(20)[None]
    plain = model(input_ids=ids).logits
    shake(model, 0.1)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    with lora_off(model), torch.no_grad():
        off = model(input_ids=ids).logits
    assert torch.equal(off, plain), "text alone passes no other part that was moved"
    assert not torch.allclose(model(input_ids=ids).logits, plain)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trained


def test_rollouts_are_used_num_iterations_times(tmp_path: Path) -> None:
    own = trainer(tmp_path, num_iterations=2, max_steps=4, epsilon=1e-6)
    calls: list[Any] = []
    make = own.maker.make
    own.maker.make = lambda items, seed: calls.append([i.sample_id for i in items]) or make(items, seed)  # type: ignore
    own.train()
    assert len(calls) == 2
    clipped = [log["loop1/clip_fraction"] for log in own.state.log_history if "loop1/clip_fraction" in log]
    assert clipped[0] == 0, "the ratio is exactly 1 on fresh rollouts"
    assert clipped[1] > 0.1, "and is not once the weights moved"


def test_accumulated_batches_are_one_large_batch(tmp_path: Path) -> None:
    """Supervised, where nothing is sampled: the loss must be that of all prompts together, for every loss type."""
    for loss_type in ("dapo", "grpo"):
        settings = {"objective": "supervised", "loss_type": loss_type, "max_steps": 1, "optim": "sgd"}
        whole = trainer(tmp_path / f"{loss_type}1", **settings, per_device_train_batch_size=16)
        parts = trainer(
            tmp_path / f"{loss_type}2", **settings, per_device_train_batch_size=8, gradient_accumulation_steps=2
        )
        for own in (whole, parts):
            own.train()
        assert_equal(weights(whole), weights(parts), 2e-6)


@pytest.mark.parametrize("more", [{"num_iterations": 2}, {"curriculum": True, "adaptive_loop_weights": True}])
def test_a_resumed_run_ends_as_the_whole_one(tmp_path: Path, more: dict[str, Any]) -> None:
    settings = {**more, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trainer(tmp_path / "whole", **settings)
    whole.train()
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    again = trainer(tmp_path / "again", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_equal(weights(whole), weights(again))
    assert whole.ema is not None
    assert again.ema is not None
    assert_equal(whole.ema.weights, again.ema.weights)
    assert whole.maker.controller.spread == again.maker.controller.spread
    assert whole.ema.steps == again.ema.steps == 4


def test_a_loss_that_is_not_finite_stops_with_the_last_good_checkpoint(tmp_path: Path) -> None:
    own = trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=1)
    real = own.compute_loss

    def broken(model: Any, groups: Any, *args: Any, **kwargs: Any) -> Any:
        if own.state.global_step == 2:
            for parameter in own.sa2va.text_hidden_fcs.parameters():
                parameter.data.fill_(float("nan"))
        return real(model, groups, *args, **kwargs)

    own.compute_loss = broken  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"step 3: the loss is nan; training stops, the last good checkpoint is .*-2;"):
        own.train()


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(tmp_path: Path) -> None:
    """The loss is finite all the time."""
    own = trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=1)
    fcs = next(own.sa2va.text_hidden_fcs.parameters())
    fcs.register_hook(lambda gradient: gradient * float("nan" if own.state.global_step == 2 else 1))
    message = r"step 3: a gradient is not finite; training stops, the last good checkpoint is .*checkpoint-2; lower"
    with pytest.raises(ValueError, match=message):
        own.train()
    assert all(tensor.isfinite().all() for tensor in weights(own).values())


def test_a_judge_that_goes_away_names_the_step_and_the_way_back(tmp_path: Path) -> None:
    asked: list[int] = []

    def judge(**columns: Any) -> list[float | None]:
        asked.append(1)
        if len(asked) > 2:
            raise ValueError("LLM judge http://there: 50 failures in a row; is the server up?")
        return [None] * len(columns["prompts"])

    model, processor = nano()
    settings = config(tmp_path, max_steps=4, save_strategy="steps", save_steps=1)
    paid = {"loop1": {"iou": Reward(iou_reward, 1.0), "judge": Reward(judge, 1.0)}, "loop2": rewards()["loop2"]}
    own = Sa2VAGRPOTrainer(model, processor, settings, regions(), paid)
    freeze_unreached(own, regions()[:2])
    own.begin()
    message = r"^step 3: LLM judge http://there: 50 failures .*; --resume goes on from .*checkpoint-2$"
    with pytest.raises(ValueError, match=message):
        own.train()
    first = own.state.log_history[0]
    assert first["loop1/missing/judge"] == 1
    assert "loop1/reward_mean" not in first, "an unknown sum is no number"
    assert first["grad_norm"] > 0, "IoU is still learned from"


def test_minutes_count_what_was_spent_before_an_interruption(tmp_path: Path) -> None:
    own = trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    own.train()
    again = trainer(tmp_path, max_steps=100, max_minutes=10.0)
    own.earlier_s = 600.0
    save_run_state(own)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 3, "the time was up"
    assert again.seconds > 600


def test_the_warm_up_begins_above_0_and_the_end_is_transformers(tmp_path: Path) -> None:
    own = trainer(tmp_path, lr_scheduler_type="linear", warmup_steps=3, max_steps=6, learning_rate=0.4)
    own.create_optimizer()
    schedule = own.create_scheduler(6)
    rates = []
    for _ in range(6):
        rates.append(schedule.get_last_lr()[0])
        own.optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4 * 2 / 3, 0.4 / 3])
    assert set(schedule.get_last_lr()) == {0.0}


def test_captions_that_are_all_cut_off_are_told(tmp_path: Path) -> None:
    own = trainer(tmp_path, max_completion_length=1, max_steps=1)
    with pytest.warns(UserWarning, match="every caption was cut off at max_completion_length 1 and does not count"):
        own.train()
    assert own.state.log_history[0]["loop1/frac_truncated"] == 1


def test_out_of_memory_says_what_to_lower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    own = trainer(tmp_path)
    monkeypatch.setattr(own.maker, "make", full)
    with pytest.raises(ValueError, match="step 1: out of GPU memory in rollouts; lower batch_size, num_generations"):
        own.train()
    own = trainer(tmp_path)
    monkeypatch.setattr(own.model, "forward", full)
    monkeypatch.setattr(type(own), "_rollouts", lambda self, items, number: self.maker.supervise(items))
    with pytest.raises(ValueError, match="out of GPU memory in the loss; lower batch_size, num_generations or max_dyn"):
        own.train()


def test_fsdp_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(tmp_path / "run")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # as accelerate launch --use_fsdp sets it
    with pytest.raises(ValueError, match="FSDP is not supported in training; use torchrun alone"):
        Sa2VAGRPOTrainer(*nano(), settings, regions(), rewards())
    assert not (tmp_path / "run").exists()


def test_pathwise_without_a_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pathwise_weight is 1\.0, but there is no reward network"):
        Sa2VAGRPOTrainer(*nano(), config(tmp_path, pathwise_weight=1.0), regions(), rewards())


def test_all_groups_without_spread_are_a_step_that_changes_nothing(tmp_path: Path) -> None:
    model, processor = nano()
    equal = {"a": Reward(lambda **columns: [0.5] * len(columns["prompts"]), 1.0)}
    own = Sa2VAGRPOTrainer(model, processor, config(tmp_path), regions(), {"loop1": equal, "loop2": equal})
    start = weights(own)
    own.train()
    assert_equal(weights(own), start)
    assert own.state.log_history[0]["loop1/frac_zero_std"] == 1


def test_bfloat16_weights_train_in_float32_under_autocast(tmp_path: Path) -> None:
    """As on a GPU: what is frozen is bfloat16, what trains float32."""
    model, processor = nano(dtype=torch.bfloat16)
    own = Sa2VAGRPOTrainer(model, processor, config(tmp_path, bf16=True), regions(), rewards(caption=1.0))
    freeze_unreached(own, regions()[:2])
    own.begin()
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    start = weights(own)
    own.train()
    moved = [name for name, tensor in weights(own).items() if not torch.equal(tensor, start[name])]
    assert len(moved) == len(start)
    with torch.no_grad(), own.accelerator.autocast():
        measured = measure(model, regions()[:4], own.maker.cache, 16)
    assert np.isfinite(measured.values["iou"]).all()
