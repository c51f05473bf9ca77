# Copyright 2026 The gated-llama authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Loading and saving of gated checkpoints: every tensor has its place, and a folder carries the code that reads it."""

import shutil
import sys
from pathlib import Path

from transformers import PreTrainedModel
from transformers.utils import logging

from .configuration_gated import AUTO_MAP, OWN_FILES, file_of


logger = logging.get_logger(__name__)

# Parts of a parameter's name that come from a wrapped module, and how to unwrap it.
WRAPPED_NAMES = {
    "_orig_mod": "compile modules in place (`module.compile()`) or pass the state_dict of the uncompiled model",
    "parametrizations": "remove the parametrisations (torch.nn.utils.parametrize.remove_parametrizations)",
    "base_layer": "merge the adapter (`merge_and_unload()` of PEFT)",
}


def in_source(cls: type) -> bool:
    """Whether a class stands in the source of its module, and was not made at run time by a wrapper."""
    return "<locals>" in cls.__qualname__ or hasattr(sys.modules.get(cls.__module__), cls.__name__)


def copy_code(folder):
    """Copies the files that read a gated checkpoint into its folder."""
    for name in OWN_FILES:
        shutil.copyfile(Path(__file__).with_name(f"{name}.py"), Path(folder, f"{name}.py"))


class StrictCheckpoints:
    """What pretrained models of this package do beyond the library's when they are loaded and saved."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """
        As in the parent, but no tensor is invented or dropped, except those of another head.

        Raises:
            ValueError: the tensors in the file are not those of the config, or the folder was written by a derived
                class and would be loaded as its parent.
        """
        for name in OWN_FILES:
            own = Path(__file__).with_name(f"{name}.py")
            code = Path(pretrained_model_name_or_path or "", own.name)
            if code.is_file() and own.is_file() and code.read_bytes() != own.read_bytes():
                logger.warning(f"{code.parent} carries a {own.name} that differs from {own}, which loads it.")
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        model._refuse_derived(pretrained_model_name_or_path)
        for fault, keys in model._loading_faults(info).items():
            if keys:
                raise ValueError(
                    f"{pretrained_model_name_or_path} {fault}: {len(keys)} tensors, the first {min(keys)!r}. Loading "
                    "does not invent or drop weights: convert a checkpoint of another architecture with "
                    "`gated-llama convert SOURCE OUT` (pip install gated-llama)."
                )
        return (model, info) if wants_info else model

    def _refuse_derived(self, source):
        """Raises ValueError where a class of this package would stand in for one that was derived from it."""
        if type(self).__module__.rsplit(".", 1)[-1] not in OWN_FILES:
            return
        reference = (getattr(self.config, "auto_map", None) or {}).get(self._auto_class)
        names = [reference] if reference and file_of(reference) not in OWN_FILES else self.config.architectures or []
        known = {each.rsplit(".", 1)[-1] for each in AUTO_MAP.values()}
        if others := [name for name in names if name not in known]:
            raise ValueError(
                f"{source} was saved by {others[0]!r}, a class derived from those of gated-llama: load it with that "
                f"class. As {type(self).__name__} it would lose what was added."
            )

    def _loading_faults(self, info) -> dict[str, list[str]]:
        """Names of tensors that are missing, of another shape or left over, by what is wrong with them."""
        decoder = {self.base_model_prefix, *(name for name, _ in self.base_model.named_children())}
        other_head = type(self).__name__ not in (self.config.architectures or [])
        modules = dict(self.named_modules()) if getattr(self, "hf_quantizer", None) else {}

        def matters(key: str) -> bool:
            return key.split(".")[0] in decoder or not other_head

        def unquantised(key: str) -> bool:
            # Scales and the like lie beside the weight of their module.
            module, _, kind = key.rpartition(".")
            return module not in modules or kind in ("weight", "bias", "g_param")

        missing, unexpected = info["missing_keys"], info["unexpected_keys"]
        # Classifiers start from nothing in fine-tuning, a language model does not.
        return {
            "has no weights for a part of the model": [k for k in missing if matters(k) or k == "lm_head.weight"],
            "has other shapes": [key for key, *_ in info["mismatched_keys"] if key.split(".")[0] in decoder],
            "has weights that its config does not declare": [k for k in unexpected if matters(k) and unquantised(k)],
        }

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, *args, **kwargs):
        """
        As in the parent; the folder names and carries the code of the class that was written down.

        FSDP2 and parametrisations give the module a class of their own, made at run time, which no folder can carry.
        """
        made = type(self)
        own = next(cls for cls in made.__mro__ if issubclass(cls, PreTrainedModel) and in_source(cls))
        self._map_classes(own)
        if is_main_process and file_of(AUTO_MAP["AutoModel"]) != own.__module__.rsplit(".", 1)[-1]:
            # The parent copies the file of `own` and what that imports relatively.
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            copy_code(save_directory)
        self._warn_of_names(state_dict)
        self.__class__ = own
        try:
            return super().save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)
        finally:
            self.__class__ = made

    def _map_classes(self, own: type):
        """The config's `auto_map`: classes in the files of this model and config, and else those of this package."""
        files = {cls.__module__.rsplit(".", 1)[-1] for cls in (own, type(self.config))}
        given = getattr(self.config, "auto_map", None) or {}
        self.config.auto_map = given | {
            name: reference for name, reference in AUTO_MAP.items() if file_of(str(given.get(name))) not in files
        }

    def _warn_of_names(self, state_dict):
        """Warns where wrapped modules give tensors names under which nothing loads them."""
        if getattr(self, "hf_quantizer", None) or getattr(self, "_hf_peft_config_loaded", False):
            return
        names = state_dict if state_dict is not None else [name for name, _ in self.named_parameters()]
        for part, cure in WRAPPED_NAMES.items():
            if renamed := sorted(name for name in names if part in name.split(".")):
                logger.warning(
                    f"{len(renamed)} tensors are saved under names that from_pretrained does not read, the first "
                    f"{renamed[0]!r}: {cure}, then save."
                )


__all__ = ["StrictCheckpoints", "copy_code"]
