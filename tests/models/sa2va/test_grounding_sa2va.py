from typing import Any

import torch

from rl_reward_network.models.sa2va.grounding_sa2va import sparse_prompts


def test_no_click_means_two_not_a_point_vectors_before_the_seg(tiny_model: Any) -> None:
    embeddings = torch.randn(3, 32)
    prompts = sparse_prompts(tiny_model.grounding_encoder, embeddings)
    nothing = tiny_model.grounding_encoder.prompt_encoder.not_a_point_embed.weight[0]
    assert prompts.shape == (3, 3, 32)
    assert torch.equal(prompts[:, 2], embeddings)
    assert torch.equal(prompts[1, 0], nothing)
    assert torch.equal(prompts[2, 1], nothing)


def test_broadcast_decoding_equals_transformers_own_decoder(tiny_model: Any) -> None:
    sam = tiny_model.grounding_encoder
    features = tiny_model.get_sam_features(torch.randn(1, 3, 256, 256))
    embeddings = torch.randn(3, 32)
    fine, middle, coarse = features.maps
    with torch.no_grad():
        masks, scores, _, objects = sam.mask_decoder(
            image_embeddings=coarse + sam.no_memory_embedding.reshape(1, -1, 1, 1),
            image_positional_embeddings=sam.get_image_wide_positional_embeddings(),
            sparse_prompt_embeddings=sparse_prompts(sam, embeddings)[None],
            dense_prompt_embeddings=sam.prompt_encoder.no_mask_embed.weight.reshape(1, -1, 1, 1).expand_as(coarse),
            multimask_output=True,
            high_resolution_features=[sam.mask_decoder.conv_s0(fine), sam.mask_decoder.conv_s1(middle)],
        )
        decoded = tiny_model.decode_masks(features, embeddings)
    assert torch.allclose(decoded.candidates[:, 1:], masks[0], atol=1e-4)
    assert torch.allclose(decoded.candidate_scores[:, 1:], scores[0], atol=1e-5)
    assert torch.allclose(decoded.object_score_logits, objects[0, :, 0], atol=1e-5)


def test_features_of_one_image_are_those_of_the_batch(tiny_model: Any) -> None:
    pixels = torch.randn(2, 3, 256, 256)
    with torch.no_grad():
        both, second = tiny_model.get_sam_features(pixels), tiny_model.get_sam_features(pixels[1:])
    assert [tuple(level.shape) for level in both.maps] == [(2, 32, 64, 64), (2, 32, 32, 32), (2, 32, 16, 16)]
    for found, expected in zip(both[1].maps, second.maps, strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


def test_gradients_reach_the_decoder_from_a_mask(tiny_model: Any) -> None:
    """transformers' own helpers run under no_grad; ours must not."""
    features = tiny_model.get_sam_features(torch.randn(1, 3, 256, 256))
    prompt = torch.randn(1, 32, requires_grad=True)
    tiny_model.decode_masks(features, prompt).mask_logits.mean().backward()
    assert prompt.grad is not None
    assert prompt.grad.abs().sum() > 0
    tiny_model.zero_grad()
