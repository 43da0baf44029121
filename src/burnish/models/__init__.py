"""Models shipped with burnish: plain ONNX inference graphs with weights, built without PyTorch."""

from burnish.models.bert import bert
from burnish.models.cnn import cnn
from burnish.models.create import create
from burnish.models.dlrm import dlrm
from burnish.models.gpt2 import gpt2
from burnish.models.lstm import lstm
from burnish.models.mlp import mlp
from burnish.models.residual import residual_network
from burnish.models.ssd import ssd
from burnish.models.unet import unet

__all__ = ["bert", "cnn", "create", "dlrm", "gpt2", "lstm", "mlp", "residual_network", "ssd", "unet"]
