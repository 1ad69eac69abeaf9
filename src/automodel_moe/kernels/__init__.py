"""One op a file: the kernel, and its plain-torch reference beside it."""
