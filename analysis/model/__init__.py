"""What a job should take on these machines: the reference that no peer and no history can give.

`expectation` meets the documents, `step` adds up the parts, `traffic`, `flops` and `collectives` say what each part is,
`hardware` what the machines can do, and `constants` the few figures that were fitted. notes/model.md has the sources.
"""
