"""Page copy, checksums and paged attention: for each a reference version and a fast one behind one function.

Importing this package, or `kernels.checksum`, doesn't import torch.
"""
