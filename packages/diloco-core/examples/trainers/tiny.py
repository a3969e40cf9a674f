"""What the examples of this folder share: a tiny model, real text, and two replicas to train it.

Nothing is downloaded: the model is made from its configuration, and the text is Python's own.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

WIDTH = 32  # bytes in an example
TEXT = Path(argparse.__file__).read_bytes()


def make_model():
    """A GPT-2 that reads bytes; the same on every replica."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"vocab_size": 256, "n_positions": WIDTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=None, eos_token_id=None, **size))


class Text(torch.utils.data.Dataset):
    """Every second part of the text, or every nth: each replica has its own."""

    def __init__(self, rank, replicas):
        whole = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
        self.rows = whole[: len(whole) // WIDTH * WIDTH].view(-1, WIDTH)[rank::replicas][:400]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


def main(file, steps=40):
    """Train with two replicas, as processes of this machine that meet in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        replicas = [start(file, rank, f"{folder}/run", steps) for rank in range(2)]
        for rank, replica in enumerate(replicas):
            out, _ = replica.communicate()
            sys.stdout.write(f"rank {rank}: exit code {replica.returncode}, {out}")
    sys.exit(any(replica.returncode for replica in replicas))


def start(file, rank, run, steps, **options):
    """Start a replica, as any launcher would; its trainer is the function train() of the file."""
    command = [sys.executable, "-m", "diloco_core.replica_entrypoint"]
    command += ["--rendezvous", str(run), "--world-size", "2", "--rank", str(rank)]
    command += ["--trainer-module", Path(file).stem]
    command += ["--trainer-kwargs-json", f'{{"steps": {steps}}}']
    options = {"env": {"OMP_NUM_THREADS": "1", **os.environ}, **options}
    folder = Path(file).parent
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, **options)
