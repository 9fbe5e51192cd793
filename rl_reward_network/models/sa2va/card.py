"""Python lines of the model cards. `<this folder>` and `image.png` stand for the reader's own; tests run the lines."""

WHOLE_MODEL = """```python
import rl_reward_network.models.sa2va  # registers Sa2VA with transformers; no remote code is run
from PIL import Image
from transformers import AutoModel, AutoProcessor

model = AutoModel.from_pretrained("<this folder>")
processor = AutoProcessor.from_pretrained("<this folder>")
image, text = Image.open("image.png"), "<image>Please segment the blood vessel."
result = model.predict_forward(image=image, text=text, processor=processor)
print(result["prediction"], [mask.shape for mask in result["prediction_masks"]])
```"""

TRAINED_PART = """```python
from PIL import Image
from rl_reward_network.models.lora import load_trainable
from rl_reward_network.models.sa2va import load_sa2va_model

model, processor = load_sa2va_model("{base}")
load_trainable(model, "<this folder>/trainable")
processor.max_tiles = {max_tiles}  # as in training
{resize}image, text = Image.open("image.png"), "<image>Please segment the blood vessel."
result = model.predict_forward(image=image, text=text, processor=processor)
print(result["prediction"], [mask.shape for mask in result["prediction_masks"]])
```"""

LORA_PART = """LoRA alone, without the other trained tensors, in peft:

```python
from peft import PeftModel
from rl_reward_network.models.sa2va import load_sa2va_model

model, processor = load_sa2va_model("{base}")
model = PeftModel.from_pretrained(model, "<this folder>/trainable")
```"""
