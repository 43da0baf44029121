"""What every test may rely on."""

import signal

# A shell starts its background jobs deaf to Ctrl-C, and their children inherit that; the tests of interrupts send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
