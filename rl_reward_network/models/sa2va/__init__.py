"""Native Sa2VA: configuration, checkpoints, processing, model, decoding, prediction, mask losses."""

from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor

__all__ = ["Sa2VAConfig", "Sa2VAForConditionalGeneration", "Sa2VAProcessor", "load_sa2va_model"]
