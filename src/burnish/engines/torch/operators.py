"""All operators that have a translation to PyTorch: importing this registers the rules of the plain ones and of the families."""

from burnish.engines.torch.families.attention import translation as attention
from burnish.engines.torch.families.convolution import kernel_calls
from burnish.engines.torch.families.convolution import translation as convolution
from burnish.engines.torch.families.elementwise import translation as elementwise
from burnish.engines.torch.families.embedding import translation as embedding
from burnish.engines.torch.families.exchange import rows
from burnish.engines.torch.families.exchange import translation as exchange
from burnish.engines.torch.families.linear import translation as linear
from burnish.engines.torch.families.normalization import translation as normalization
from burnish.engines.torch.families.pooling import translation as pooling
from burnish.engines.torch.families.precision import translation as precision
from burnish.engines.torch.families.recurrent import translation as recurrent
from burnish.engines.torch.families.resize import translation as resize
from burnish.engines.torch.families.softmax import translation as softmax
from burnish.engines.torch.translate import operators as plain
from burnish.engines.torch.translate import splitting

__all__ = [
    "attention",
    "convolution",
    "elementwise",
    "embedding",
    "exchange",
    "kernel_calls",
    "linear",
    "normalization",
    "plain",
    "pooling",
    "precision",
    "recurrent",
    "resize",
    "rows",
    "softmax",
    "splitting",
]
