"""The file formats as JSON, written by `make schemas`; nothing reads them at run time."""
