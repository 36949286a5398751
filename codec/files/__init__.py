"""Files of tensors: frames, arrays in .npz, .npy and .safetensors files, and packed model files.

A packed model file is a .safetensors file whose entries contain frames; ``container.md`` specifies its bytes. Only
regular files are opened, because reading a pipe or a device may block or never end. Sizes in a file are checked before
memory is allocated. Pickles are read only by torch's ``weights_only`` loader.
"""
