"""From text and images to a model's inputs: tokenizer, templates, tiles and regions of one checkpoint.

Source: bytedance/Sa2VA@9832e1a. One deliberate difference: a mismatch between placeholders and features is an error.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, PreTrainedTokenizerBase, ProcessorMixin, Qwen2VLImageProcessorPil

from rl_reward_network.atomic_io import read_json
from rl_reward_network.models.sa2va import pixels_sa2va, templates
from rl_reward_network.models.sa2va.arguments_sa2va import hub_arguments
from rl_reward_network.models.sa2va.checkpoint_sa2va import (
    OWN_SETTINGS,
    PROCESSOR_FILE,
    located,
    name_processor,
    open_checkpoint,
    read_image_processor,
)
from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig
from rl_reward_network.models.sa2va.families import BY_MODEL_TYPE
from rl_reward_network.models.sa2va.pixels_sa2va import ImageLike, ImageResize, RegionPrompt
from rl_reward_network.models.sa2va.templates import IMAGE_PLACEHOLDER


class Sa2VAProcessor(ProcessorMixin):
    """Tokenizer, templates and the two image pipelines of one checkpoint.

    Args:
        tokenizer: of the checkpoint's family, with `[SEG]` and the placeholder of image features.
        template: key of `templates.TEMPLATES`.
        tile_size: side of a tile in pixels.
        tokens_per_tile: image tokens of one tile; their square root is the side of the region grid.
        sam_image_size: side in pixels of SAM 2's input.
        max_tiles: most tiles of one image, without the thumbnail; 1 makes RL several times cheaper; not of a Qwen-VL.
        patches: transformers' image processor of a Qwen-VL; None: an InternVL.
        prompt_prefix: text in front of the first turn, such as a beginning-of-text token.
    """

    image_resize: ImageResize = "prediction"  # of a Qwen-VL; see `pixels_sa2va.resized_image`
    region_prompt: RegionPrompt = "outline"  # how a Qwen-VL is shown a region; see `pixels_sa2va.draw_region`

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str = "qwen_chat",
        tile_size: int = 448,
        tokens_per_tile: int = 256,
        sam_image_size: int = 1024,
        max_tiles: int = 12,
        patches: Qwen2VLImageProcessorPil | None = None,
        prompt_prefix: str = "",
    ) -> None:
        if template not in templates.TEMPLATES:
            raise ValueError(f"template is {template!r}, known are {sorted(templates.TEMPLATES)}")
        if max_tiles < 1:
            raise ValueError(f"max_tiles is {max_tiles}, expected 1 or more")
        self.tokenizer, self.patches, self.prompt_prefix = tokenizer, patches, prompt_prefix
        self.template, self.template_name = templates.TEMPLATES[template], template
        self.tile_size, self.tokens_per_tile = tile_size, 1 if patches else tokens_per_tile
        self.sam_image_size, self.max_tiles = sam_image_size, max_tiles
        self.grid = int(tokens_per_tile**0.5)
        self.image_tokens = templates.QWEN_VL_TOKENS if patches else templates.INTERNVL_TOKENS
        vocabulary, never = tokenizer.get_vocab(), self.image_tokens.never_sampled
        if missing := [
            token for token in (self.image_tokens.context, templates.SEG, *never) if token not in vocabulary
        ]:
            raise ValueError(f"the tokenizer has no token {missing[0]!r}; this is not a Sa2VA tokenizer")
        self.image_token_id, self.seg_token_id = vocabulary[self.image_tokens.context], vocabulary[templates.SEG]
        self.never_sampled_ids = [vocabulary[token] for token in never]
        self.chat = templates.chat_instruction(tokenizer) if patches else self.template.instruction  # with `{input}`

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, path: str | Path, max_tiles: int | None = None, **arguments: Any
    ) -> "Sa2VAProcessor":
        """The processor of a model folder or hub id, in either layout; no weights are fetched, and no code is run.

        `max_tiles` None is the checkpoint's; `arguments` are those of a download, see `arguments_sa2va`. A ValueError
        if no Sa2VA is there, its tokenizer lacks a special token, or an argument is not supported.
        """
        hub = hub_arguments(arguments)
        local = located(path, weights=False, **hub)
        if (local / "config.json").exists() or not (local / PROCESSOR_FILE).exists():
            folder = open_checkpoint(path, weights=False, **hub)
            config = folder.model_config()
            return cls.from_config(config, folder.tokenizer(config), max_tiles, folder.image_processor(config))
        settings = read_json(local / PROCESSOR_FILE).get(OWN_SETTINGS)  # of `save_pretrained`, without a model
        if not settings:
            raise ValueError(f"{local}: no config.json, and no Sa2VA processor; give the folder of a Sa2VA")
        tokenizer = BY_MODEL_TYPE[settings.pop("model_type")].tokenizer_class.from_pretrained(local)
        shown = {name: settings.pop(name) for name in ("image_resize", "region_prompt")}
        settings |= {} if max_tiles is None else {"max_tiles": max_tiles}
        processor = cls(tokenizer, patches=read_image_processor(local)[0], **settings)
        vars(processor).update(shown)
        return processor

    @classmethod
    def from_config(
        cls,
        config: Sa2VAConfig,
        tokenizer: PreTrainedTokenizerBase,
        max_tiles: int | None = None,
        patches: Qwen2VLImageProcessorPil | None = None,
    ) -> "Sa2VAProcessor":
        """The processor for a configuration and its tokenizer; a ValueError for a Qwen-VL without image processor."""
        if config.family.body == "qwen_vl":
            if patches is None:
                raise ValueError(
                    "a Qwen-VL needs its image processor; give processor=Sa2VAProcessor.from_pretrained(...)"
                )
            processor = cls(tokenizer, sam_image_size=config.sam2_image_size, patches=patches)
            processor.set_image_resize(config.image_resize)
            return processor
        return cls(
            tokenizer,
            template=config.template,
            tile_size=config.vision_config.image_size[0],
            tokens_per_tile=config.tokens_per_tile,
            sam_image_size=config.sam2_image_size,
            max_tiles=config.max_tiles if max_tiles is None else max_tiles,
            prompt_prefix=config.family.prompt_prefix,
        )

    def save_pretrained(  # type: ignore[override]
        self, folder: str | Path, push_to_hub: bool = False, repo_id: str | None = None, **of_hub: Any
    ) -> None:
        """Write the tokenizer, a Qwen-VL's image processor, and the settings, which a model's config.json has as well.

        With `push_to_hub` upload as well, to `repo_id` (by default the folder's name), with the arguments `of_hub`.
        """
        self.tokenizer.save_pretrained(folder)
        if self.patches is not None:
            self.patches.save_pretrained(folder)
        names = ("tile_size", "sam_image_size", "max_tiles", "prompt_prefix", "image_resize", "region_prompt")
        settings = {name: getattr(self, name) for name in names} | {"tokens_per_tile": self.grid**2}
        kinds = [
            kind
            for kind, family in BY_MODEL_TYPE.items()
            if isinstance(self.tokenizer, family.tokenizer_class) and (family.body == "qwen_vl") == bool(self.patches)
        ]
        name_processor(Path(folder), {"model_type": kinds[0], "template": self.template_name, **settings})
        if push_to_hub:
            self.push_to_hub(repo_id or Path(folder).name, **of_hub)

    def __repr__(self) -> str:
        names = ("template_name", "tile_size", "tokens_per_tile", "sam_image_size", "max_tiles")
        settings = ", ".join(f"{name.removesuffix('_name')}={getattr(self, name)!r}" for name in names)
        return f"Sa2VAProcessor({settings}, tokenizer={type(self.tokenizer).__name__})"

    @property
    def system_turn(self) -> str:
        """What a Qwen-VL's chat template puts in front of a prompt; "" without a system turn."""
        before, user, _ = self.chat.partition("<|im_start|>user")
        return before if user and before.startswith("<|im_start|>system") else ""

    @property
    def shows_regions(self) -> bool:
        """Whether a text can refer to regions of the image (`mask_prompts`); if not, they are drawn into it."""
        return self.patches is None

    def set_image_resize(self, how: str | None) -> None:
        """Choose `image_resize`; None keeps the checkpoint's. A ValueError for an unknown name, or an InternVL."""
        if how is None:
            return
        if self.patches is None:
            raise ValueError(f"image_resize is {how!r}, but this model cuts images into tiles; leave it out")
        if how not in get_args(ImageResize):
            raise ValueError(f"image_resize is {how!r}, expected one of {get_args(ImageResize)}")
        self.image_resize = how  # type: ignore[assignment]

    # ---- images ----

    def tiles(self, image: ImageLike) -> list[Image.Image]:
        """RGB tiles of `tile_size` pixels, row by row; if there are several, a thumbnail is the last."""
        return pixels_sa2va.cut_tiles(image, self.max_tiles, self.tile_size)

    def pixel_values(self, tiles: Sequence[Image.Image]) -> torch.Tensor:
        """float32 (tiles, 3, S, S) of RGB tiles, ImageNet-normalised."""
        return pixels_sa2va.tile_pixels(tiles)

    def vision_inputs(
        self, images: Sequence[ImageLike], max_tiles: int | None = None
    ) -> tuple[dict[str, torch.Tensor], list[int]]:
        """Inputs of `get_vision_features` for some images, and the number of image tokens of each."""
        if self.patches is not None:
            inputs = pixels_sa2va.patch_inputs(images, self.patches, self.image_resize)
            return inputs, (inputs["image_grid_thw"].prod(1) // self.patches.merge_size**2).tolist()
        most = self.max_tiles if max_tiles is None else max_tiles
        tiles = [pixels_sa2va.cut_tiles(image, most, self.tile_size) for image in images]
        pixels = pixels_sa2va.tile_pixels([tile for group in tiles for tile in group])
        return {"pixel_values": pixels}, [len(group) * self.tokens_per_tile for group in tiles]

    def num_image_tokens(self, vision_features: Any) -> int:
        """Image tokens of one image's features from `get_vision_features`."""
        return len(vision_features) * self.tokens_per_tile

    def sam_pixel_values(self, image: ImageLike) -> torch.Tensor:
        """float32 (1, 3, S', S'): the image squashed to SAM 2's square input."""
        return pixels_sa2va.sam_pixels(image, self.sam_image_size)

    def region_cells(self, regions: np.ndarray, image: ImageLike | None = None) -> torch.Tensor:
        """bool (N, g, g) of region masks (N, H, W) of an image; see `pixels_sa2va.region_cells`."""
        return pixels_sa2va.region_cells(regions, self.grid, image)

    # ---- text ----

    def prompt_text(
        self, text: str, image_tokens: int = 0, cells: torch.Tensor | None = None, past_text: str = "", frames: int = 1
    ) -> str:
        """The full prompt: prefix, template, and in place of `<image>` its tokens and the sentence about the regions.

        A Qwen-VL has the image at the beginning of the turn, wherever `<image>` stands, as in the reference.

        Args:
            image_tokens: number of the image's tokens; 0 without an image.
            cells: bool (N, g, g), regions of the image.
            past_text: earlier turns in the chat format, with or without prefix or system turn; only without an image.
            frames: images of `image_tokens` tokens each that take the place of `<image>`, one per line in an InternVL.

        Raises:
            ValueError: `<image>` or an image without the other, or twice, behind earlier turns; a Qwen-VL with regions.
        """
        if image_tokens and past_text:
            raise ValueError("past_text must be empty with an image, which belongs to the first turn")
        turn = self._with_image(text, image_tokens, cells, frames)
        if self.patches is None:
            prompt = past_text + self.template.user_turn(turn)
            return self.prompt_prefix + prompt.removeprefix(self.prompt_prefix)
        if cells is not None:
            raise ValueError("a Qwen-VL cannot be shown a region by mask_prompts; draw it into the image")
        images = self.image_tokens.text(image_tokens) * frames if image_tokens else ""
        turn = self.chat.replace("{input}", images + text.replace(IMAGE_PLACEHOLDER, ""))
        system = self.system_turn  # once, in front of all turns
        return system + past_text.removeprefix(system) + turn.removeprefix(system)

    def _with_image(self, text: str, image_tokens: int, cells: torch.Tensor | None = None, frames: int = 1) -> str:
        """The text with the image's tokens, and the sentence about its regions, in place of `<image>`."""
        count, expected = text.count(IMAGE_PLACEHOLDER), 1 if image_tokens else 0
        left_out = self.patches is not None and count < expected  # its place is fixed
        if count != expected and not left_out:
            raise ValueError(
                f"the text holds {count} {IMAGE_PLACEHOLDER!r}, expected {expected} "
                f"({'an image was' if image_tokens else 'no image was'} given): {text[:80]!r}"
            )
        if not image_tokens:
            return text
        images = "\n".join([self.image_tokens.text(image_tokens)] * frames)
        shown = images + templates.region_sentence(cells)
        return (IMAGE_PLACEHOLDER * left_out + text).replace(IMAGE_PLACEHOLDER, shown)

    def token_ids(self, text: str) -> list[int]:
        """Token ids of a text, without added special tokens."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def answer_ids(self, answer: str) -> list[int]:
        """Token ids of an answer and its end: the template's suffix, or the eos token in a template without one."""
        end = [] if self.template.suffix else [self.tokenizer.eos_token_id]
        return self.token_ids(answer + self.template.suffix) + end

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens kept."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def tokenize_conversation(
        self,
        turns: Sequence[tuple[str, str]],
        image_tokens: int = 0,
        cells: torch.Tensor | None = None,
        max_length: int = 8192,
    ) -> dict[str, torch.Tensor]:
        """Training ids and labels of (question, answer) turns, tokenised piece by piece as in the reference.

        The reference trains a Qwen-VL without the system turn that its chat template may have.

        Args:
            turns: questions and answers; `<image>` is allowed in the first question.
            cells: bool (N, g, g), regions of the image.
            max_length: of the sequence, which is cut on the right.

        Returns:
            `input_ids` and `labels`, int64 (T,); labels are -100 except on answers and their end.
        """
        ids, labels = list[int](), list[int]()
        prefix, separator = self.prompt_prefix, self.token_ids(self.template.separator)
        for question, answer in turns:
            turn = self.template.user_turn(self._with_image(question, image_tokens, cells))
            prompt, reply = self.token_ids(prefix + turn), self.answer_ids(answer)
            ids += prompt + reply + separator
            labels += [-100] * len(prompt) + reply + [-100] * len(separator)
            prefix, image_tokens = "", 0  # of the first turn
        return {"input_ids": torch.tensor(ids[:max_length]), "labels": torch.tensor(labels[:max_length])}

    # ---- both ----

    def __call__(
        self,
        text: str | Sequence[str],
        images: ImageLike | Sequence[ImageLike] | None = None,
        mask_prompts: Sequence[np.ndarray | None] | np.ndarray | None = None,
        past_text: str = "",
        return_tensors: str = "pt",
        padding: bool = True,
    ) -> BatchFeature:
        """Model inputs of a batch; all samples have an image, or none has.

        Args:
            text: one user's turn, or one per sample; `<image>` marks the image's place.
            images: PIL image or uint8 (H, W, 3), one or one per sample.
            mask_prompts: per image a bool (N, H, W) array of regions, or None.
            past_text: earlier turns, already in the chat format.
            return_tensors, padding: of transformers' processors; always "pt" and True.

        Returns:
            A mapping with the method `to`:
            input_ids, attention_mask: int64 (B, T), padded on the left.
            pixel_values: float32 (tiles of all images, 3, S, S). sam_pixel_values: float32 (B, 3, S', S').
            In a Qwen-VL, pixel_values and image_grid_thw as `pixels_sa2va.patch_inputs` gives them; in an InternVL:
            prompt_masks: list with a bool (N, g, g) for each image that has regions.
            vp_overall_mask: bool (tiles of all images,), True on the last tile of an image with regions.

        Raises:
            ValueError: numbers of texts, images and regions differ, or an error of `prompt_text` or `region_cells`.
        """
        if return_tensors != "pt" or not padding:
            raise ValueError(f"return_tensors is {return_tensors!r}, padding {padding}; expected 'pt' and True")
        texts = [text] if isinstance(text, str) else list(text)
        single = (Image.Image, np.ndarray, str, os.PathLike)  # paths are refused, with a remedy, by `tiles`
        batch: list[Any] = [] if images is None else [images] if isinstance(images, single) else list(images)
        if batch and len(batch) != len(texts):
            raise ValueError(f"{len(texts)} texts and {len(batch)} images: give one image for each text, or none")
        if isinstance(mask_prompts, np.ndarray | torch.Tensor) and mask_prompts.ndim == 3:
            mask_prompts = [mask_prompts]
        if mask_prompts is None or not len(mask_prompts):
            mask_prompts = [None] * len(batch)
        if len(mask_prompts) != len(batch):
            raise ValueError(f"{len(mask_prompts)} mask_prompts and {len(batch)} images: give one entry for each image")
        pairs = zip(mask_prompts, batch, strict=True)
        cells = [None if region is None else self.region_cells(region, image) for region, image in pairs]
        pixels, counts = self.vision_inputs(batch) if batch else ({}, [0] * len(texts))
        rows = zip(texts, counts, cells or [None] * len(texts), strict=True)
        return self._features([self.prompt_text(*row, past_text) for row in rows], batch, pixels, counts, cells)

    def apply_chat_template(  # type: ignore[override]
        self, conversation: Any, tokenize: bool = False, return_dict: bool = False, **of_transformers: Any
    ) -> Any:
        """The prompt of messages in the chat format (`templates.read_chat`), or its model inputs; as in transformers.

        Args:
            conversation: messages, or several conversations, all with an image or none.
            tokenize: model inputs in place of text.
            return_dict: with `tokenize` the whole inputs, else `input_ids` alone.
            **of_transformers: `add_generation_prompt`, `continue_final_message`, `return_tensors` and `padding` have no
                effect: a prompt ends where the answer begins, and a last message of the assistant is continued.

        Raises:
            ValueError: messages that Sa2VA cannot answer, or another argument.
        """
        without_effect = ("add_generation_prompt", "continue_final_message", "return_tensors", "padding")
        if unknown := [name for name in of_transformers if name not in without_effect]:
            raise ValueError(f"apply_chat_template: {unknown[0]} is not supported; leave it out")
        several = bool(conversation) and not isinstance(conversation[0], Mapping)
        chats = [templates.read_chat(messages) for messages in (conversation if several else [conversation])]
        images = [image for *_, image in chats if image is not None]
        if images and len(images) != len(chats):
            raise ValueError(
                f"{len(images)} of {len(chats)} conversations have an image; expected all of them, or none"
            )
        pixels, counts = self.vision_inputs(images) if images else ({}, [0] * len(chats))
        texts = [self._chat_text(*chat[:2], count) for chat, count in zip(chats, counts, strict=True)]
        if not tokenize:
            return texts if several else texts[0]
        inputs = self._features(texts, images, pixels, counts, [None] * len(images))
        return inputs if return_dict else inputs["input_ids"]

    def _chat_text(self, questions: list[str], answers: list[str], image_tokens: int) -> str:
        """The full prompt of a conversation, with `image_tokens` in place of `<image>` in its first turn."""
        text, end = self.prompt_text(questions[0], image_tokens), self.template.suffix or str(self.tokenizer.eos_token)
        for question, answer in zip(questions[1:], answers, strict=False):
            turn = self.chat.replace("{input}", self._with_image(question, 0)).removeprefix(self.system_turn)
            text += answer + end + self.template.separator + turn
        return text + "".join(answers[len(questions) - 1 :])

    def _features(
        self, prompts: list[str], images: list[Any], pixels: dict[str, Any], counts: list[int], cells: list[Any]
    ) -> BatchFeature:
        """The model's inputs for whole prompts, images with their pixels and tokens, and regions."""
        inputs = BatchFeature(self.pad([self.token_ids(prompt) for prompt in prompts]))
        if not images:
            return inputs
        inputs.update(pixels, sam_pixel_values=torch.cat([self.sam_pixel_values(image) for image in images]))
        if self.patches is None:
            tiles = [count // self.tokens_per_tile for count in counts]
            flags = [[False] * (count - 1) + [cell is not None] for count, cell in zip(tiles, cells, strict=True)]
            inputs["prompt_masks"] = [cell for cell in cells if cell is not None]
            inputs["vp_overall_mask"] = torch.tensor([flag for group in flags for flag in group])
        return inputs

    def sequence_inputs(self, text: str, frames: Sequence[ImageLike]) -> dict[str, Any]:
        """Inputs of the language model for frames of a sequence, of one size: a tile each; in a Qwen-VL an image each.

        As `__call__` for one sample without regions, but without `sam_pixel_values`.
        """
        pixels, counts = self.vision_inputs(frames, max_tiles=1)
        inputs: dict[str, Any] = self.pad([self.token_ids(self.prompt_text(text, counts[0], frames=len(counts)))])
        return inputs | pixels

    def pad(self, sequences: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask`, int64 (B, T), of sequences padded on the left."""
        length, pad_id = max(map(len, sequences)), self.tokenizer.pad_token_id or 0
        ids = [[pad_id] * (length - len(sequence)) + list(sequence) for sequence in sequences]
        mask = [[0] * (length - len(sequence)) + [1] * len(sequence) for sequence in sequences]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
