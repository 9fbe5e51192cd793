"""Sa2VA in transformers' terms: configuration, checkpoints, processor, model, decoding, prediction, mask losses.

Importing this package registers the classes with transformers: `AutoConfig`, `AutoModel`, `AutoModelForImageTextToText`
and `AutoProcessor` then load every folder in our layout (`model_type` "sa2va"), without remote code.

Axes besides those of the package: C SAM 2 width, D language width, V vision width (in logits: words), K `[SEG]` of one
image or answer, N regions of one image, P side of the side network's input, g side of the token grid, n frames.
"""

from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoProcessor

from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor

AutoConfig.register(Sa2VAConfig.model_type, Sa2VAConfig, exist_ok=True)
AutoModel.register(Sa2VAConfig, Sa2VAForConditionalGeneration, exist_ok=True)
AutoModelForImageTextToText.register(Sa2VAConfig, Sa2VAForConditionalGeneration, exist_ok=True)
AutoProcessor.register(Sa2VAConfig, Sa2VAProcessor, exist_ok=True)

__all__ = ["Sa2VAConfig", "Sa2VAForConditionalGeneration", "Sa2VAProcessor", "load_sa2va_model"]
