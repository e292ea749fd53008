"""Room card.

Holds: rows of files, their tokens and trained flags in a mapped token file, the order and packing of batches.
Takes -> gives: dataset files + tokenizer + options -> TokenDataset -> BatchPlan -> StepBatch by index.
Inside: rows -> samples (formats) -> texts (texts, template, sandbox) in a process (reader) -> tokens (encode, prepare).
May touch: the dataset files (read), the cache folder (write), a process that reads for it.
Must never: touch the GPU, know a model, or depend on anything but its inputs and (seed, epoch).
"""
from megatrain.data.batches import BatchPlan, MicroBatch, StepBatch, eval_micro_batches
from megatrain.data.mix import Part
from megatrain.data.options import BadRow, DataOptions, Report
from megatrain.data.prepare import prepare
from megatrain.data.preview import PreviewRow, preview
from megatrain.data.tokens import TokenDataset

__all__ = ["BadRow", "BatchPlan", "DataOptions", "MicroBatch", "Part", "PreviewRow", "Report", "StepBatch",
           "TokenDataset", "eval_micro_batches", "prepare", "preview"]
