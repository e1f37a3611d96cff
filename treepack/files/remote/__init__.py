"""The edge to object stores and the hub; all other rooms work with paths of this machine.

    address                    strings to paths and addresses
    cache                      inputs and models to local paths; part_copies: parts of rows, one by one
    cache_room                 the folder, the limit and the locks of all these copies
    remote_output, uploads     outputs that are pushed as a whole; files of a run, pushed while it trains
    stored_files               small files at a path or an address
    range_reading, location    inputs that are read by range, because copies would cost more
    object_store, retries      requests to a store, and waiting for one
    hub                        models and tokenizers by their names

Only these modules name the class `RemotePath`.
"""
