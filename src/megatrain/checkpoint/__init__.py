"""Room card.

Holds: weight files, Hugging Face folders and training checkpoints: reading, writing, and the commit protocol.
Takes -> gives: a folder -> a filled segment store; a segment store -> folders that are whole or not there.
May touch: files, through `Files` alone (`dcp.py`: also through torch's own writer); the store's buffers.
Must never: run while an op writes what it reads; load a byte that does not match its hash; unpickle.
"""

from megatrain.checkpoint.average import has_average, take_averages
from megatrain.checkpoint.commit import CHECKPOINTS, Checkpoint, load_checkpoint, open_step, size_of_tree
from megatrain.checkpoint.dcp import write_dcp_folder
from megatrain.checkpoint.export import write_hf_folder
from megatrain.checkpoint.fs import Files
from megatrain.checkpoint.load_hf import check_weights, load_weights, read_buffers
from megatrain.checkpoint.state import CheckpointWriter, checkpoint_bytes, restore, save_checkpoint

__all__ = [
    "CHECKPOINTS",
    "Checkpoint",
    "CheckpointWriter",
    "Files",
    "check_weights",
    "checkpoint_bytes",
    "has_average",
    "load_checkpoint",
    "load_weights",
    "open_step",
    "read_buffers",
    "restore",
    "save_checkpoint",
    "size_of_tree",
    "take_averages",
    "write_dcp_folder",
    "write_hf_folder",
]
