"""Weights between the safetensors files of a checkpoint and a model in memory, one tensor at a time.

    directory | hub name --files--> path of every tensor --reading--> a model, or each rank's part of it
    a model, one process or sharded ------------------------writing--> safetensors files and their index

    traced              tensors without memory that record how operations cut and join them
    conversion          transformers' conversion between a checkpoint and memory, run on traced tensors
    files               the file that contains each tensor
    reading, writing    the two directions, tensor by tensor
    whole_checkpoint    a vision-language checkpoint with its text weights replaced by trained ones

None of them makes a second copy of the model in memory.
"""
