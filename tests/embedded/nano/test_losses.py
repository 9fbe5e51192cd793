from pathlib import Path

from rl_reward_network.embedded.nano.losses import nano_losses
from rl_reward_network.embedded.nano.pictures import open_pictures
from rl_reward_network.embedded.nano.train import NanoTrainer, Stage, batch_of


def test_losses_reach_every_part_by_codes_and_by_words(tmp_path: Path) -> None:
    pictures = open_pictures(tmp_path / "pictures", angiograms=2, scenes=2, seed=0)
    trainer = NanoTrainer(tmp_path, pictures)
    for by_codes in (True, False):
        stage = Stage(
            1, 1e-3, vessels=2, phrases=1, descriptions=1, blind=(1, 0), prompts=2, watched=2 * (not by_codes)
        )
        batch = batch_of(stage, pictures, trainer.processor, [0, 0, 0])
        trainer.model.zero_grad()
        trainer.helpers.zero_grad()
        losses = nano_losses(trainer.model, trainer.helpers, batch, by_codes)
        assert set(losses) == {"text", "code", "mask", "dice", "iou", *([] if by_codes else ["region"])}
        sum(losses.values()).backward()
        assert (trainer.helpers.codes.grad is not None) == by_codes
        assert (trainer.helpers.reader.weight.grad is not None) == (not by_codes)
        parts = {
            "vision": trainer.model.model.vision_tower,
            "words": trainer.model.model.language_model,
            "projection": trainer.model.text_hidden_fcs,
            "SAM 2's encoder": trainer.model.grounding_encoder.vision_encoder,
            "IoU head": trainer.model.grounding_encoder.mask_decoder.iou_prediction_head,
        }
        for name, part in parts.items():
            assert any(p.grad is not None and p.grad.abs().max() > 0 for p in part.parameters()), name
