"""Room card of the importers.

Holds:         what the keys of LLaMA-Factory, Axolotl and the paper's own code mean in a RunConfig.
Takes -> gives: another tool's YAML -> ours as text, with a plain list of what was not carried over and why.
May touch:     the file it is given; the dataset_info.json that it names.
Must never:    import torch, pass over a wish in silence, write a file.
"""

from megatrain.importers.convert import TOOLS, Imported, import_config

__all__ = ["TOOLS", "Imported", "import_config"]
