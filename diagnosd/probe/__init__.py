"""What a training process loads: standard library only, Python 3.8 and later."""
