import copy
import dataclasses
from typing import Any

import pytest
import torch

from rl_reward_network.models.sa2va.generation_sa2va import Answer, Decoding, decode
from rl_reward_network.models.sa2va.prediction_sa2va import answer_batch, answer_text
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from tests.conftest import smooth_image

TEXTS = ["<image>Please segment the vessel.", "<image>Where are bright vessels, please?"]


def ask(model: Any, processor: Sa2VAProcessor, how: Decoding, texts: list[str] = TEXTS) -> list[Answer]:
    return answer_batch(model, processor, processor(texts, [smooth_image(120, 90)] * len(texts)), how)


def test_greedy_answers_equal_transformers_generate(tiny_model, tiny_processor):
    inputs = tiny_processor(TEXTS, [smooth_image(120, 90)] * 2)
    generated = tiny_model.generate(**inputs, max_new_tokens=20, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    for row, answer in zip(generated.tolist(), ask(tiny_model, tiny_processor, Decoding(20)), strict=True):
        assert row[: len(answer.token_ids)] == answer.token_ids
        assert answer.finished


@pytest.mark.parametrize("guess", ["Sure [SEG].<|im_end|>", "Sure it is", "nonsense", "S", "Sure [SEG].<|im_end|>more"])
def test_a_guess_never_changes_the_answer(tiny_model, tiny_processor, guess):
    plain = ask(tiny_model, tiny_processor, Decoding(20))
    guessed = ask(tiny_model, tiny_processor, Decoding(20, guess_ids=tiny_processor.token_ids(guess)))
    for a, b in zip(plain, guessed, strict=True):
        assert a.token_ids == b.token_ids
        states, same = (torch.stack(answer.states_at(tiny_processor.seg_token_id)) for answer in (a, b))
        assert torch.allclose(states, same, atol=1e-4)


def test_a_right_guess_saves_forward_passes(tiny_model, tiny_processor):
    calls = []
    hook = tiny_model.model.language_model.register_forward_hook(lambda *_: calls.append(1))
    try:
        answer = ask(tiny_model, tiny_processor, Decoding(20), TEXTS[:1])[0]
        without = len(calls)
        calls.clear()
        ask(tiny_model, tiny_processor, Decoding(20, guess_ids=answer.token_ids), TEXTS[:1])
    finally:
        hook.remove()
    assert without == len(answer.token_ids)  # the stop token's own state is not needed
    assert len(calls) == 1


def test_sampling_repeats_with_its_seed_and_never_says_a_placeholder(tiny_model, tiny_processor):
    def sample(seed: int) -> list[list[int]]:
        how = Decoding(40, temperature=50.0, generator=torch.Generator().manual_seed(seed))
        return [answer.token_ids for answer in ask(tiny_model, tiny_processor, how, TEXTS * 4)]

    first = sample(0)
    assert first == sample(0)
    assert first != sample(1)
    assert not set(tiny_processor.never_sampled_ids) & {index for row in first for index in row}


def test_state_at_seg_is_the_teacher_forced_one(tiny_model, tiny_processor):
    answer = ask(tiny_model, tiny_processor, Decoding(20), TEXTS[:1])[0]
    inputs = tiny_processor(TEXTS[0], smooth_image(120, 90))
    inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([answer.token_ids])], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        states = tiny_model(**inputs).last_hidden_state[0]
    expected = states[inputs["input_ids"][0] == tiny_processor.seg_token_id]
    assert torch.allclose(torch.stack(answer.states_at(tiny_processor.seg_token_id)), expected, atol=1e-4)


def test_a_seg_cut_off_by_the_limit_keeps_its_mask(tiny_model, tiny_processor):
    full = ask(tiny_model, tiny_processor, Decoding(20), TEXTS[:1])[0]
    until_seg = full.token_ids.index(tiny_processor.seg_token_id) + 1
    cut = ask(tiny_model, tiny_processor, Decoding(until_seg), TEXTS[:1])[0]
    assert cut.token_ids[-1] == tiny_processor.seg_token_id
    (state,) = cut.states_at(tiny_processor.seg_token_id)
    assert torch.allclose(state, full.states_at(tiny_processor.seg_token_id)[0], atol=1e-4)


def test_a_stop_word_that_is_no_token_stops(tiny_model, tiny_processor):
    """As phi3_chat's `<|end|>` on a Qwen tokenizer: ordinary text of several tokens. The model spells it here."""
    model, processor = copy.deepcopy(tiny_model), copy.copy(tiny_processor)
    processor.template = dataclasses.replace(processor.template, stop_words=("<stop>",))
    spelled = processor.token_ids("[SEG]<stop>")
    assert len(spelled) == 1 + len("<stop>")
    embeds = model.get_input_embeddings().weight.data
    model.lm_head.weight.data.zero_()
    for current, following in zip([processor.token_ids("\n")[0], *spelled], [*spelled, spelled[0]], strict=True):
        model.lm_head.weight.data[following] += 8 * embeds[current] / embeds[current].norm()
    for layer in model.model.language_model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    answer = ask(model, processor, Decoding(40), TEXTS[:1])[0]
    assert answer_text(processor, answer) == "[SEG]<stop>"


def test_rows_that_differ_accept_different_parts_of_a_guess(tiny_model, tiny_processor):
    """Random heads: each row says something else, the guess is right for one row only."""
    model = copy.deepcopy(tiny_model)
    torch.manual_seed(1)
    model.lm_head.weight.data.normal_()
    for layer in model.model.language_model.layers:
        layer.self_attn.o_proj.weight.data.mul_(5)
    texts = [*TEXTS, "<image>Z?", "<image>12345678"]
    plain = ask(model, tiny_processor, Decoding(12), texts)
    assert len({tuple(answer.token_ids) for answer in plain}) > 1, "the rows must differ"
    for guess in (plain[0].token_ids, plain[-1].token_ids[:3], [*plain[1].token_ids, 5]):
        for a, b in zip(plain, ask(model, tiny_processor, Decoding(12, guess_ids=guess), texts), strict=True):
            assert a.token_ids == b.token_ids


def test_a_model_in_training_mode_answers_as_in_evaluation(tiny_model, tiny_processor):
    model = copy.deepcopy(tiny_model)
    expected = model.predict_forward(image=smooth_image(50, 50), text=TEXTS[0], processor=tiny_processor)
    model.activation_checkpointing_enable()
    model.train()
    found = model.predict_forward(image=smooth_image(50, 50), text=TEXTS[0], processor=tiny_processor)
    assert found["prediction"] == expected["prediction"]
    assert (found["prediction_masks"][0] == expected["prediction_masks"][0]).all()
    assert model.training
    with pytest.raises(ValueError, match="training"):
        decode(model, tiny_processor, torch.zeros(1, 2, 64), torch.ones(1, 2, dtype=torch.long), Decoding(5))


def test_nonsense_limits_and_several_answers_per_image_are_refused(tiny_model, tiny_processor):
    embeds, mask = torch.zeros(1, 2, 64), torch.ones(1, 2, dtype=torch.long)
    several = tiny_processor(TEXTS[0], smooth_image(50, 50)) | {"num_return_sequences": 2, "do_sample": True}
    with pytest.raises(ValueError, match="num_return_sequences"):
        tiny_model.generate(**several, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"max_new_tokens.*0"):
        decode(tiny_model, tiny_processor, embeds, mask, Decoding(0))
    with pytest.raises(ValueError, match=r"guess.*temperature 0"):
        decode(tiny_model, tiny_processor, embeds, mask, Decoding(5, temperature=1.0, guess_ids=[1]))
