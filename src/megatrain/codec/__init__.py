"""Room card.

Holds: lossless codecs for what travels or waits (gradients, states); none yet.
Takes -> gives: flat arrays -> the same values in fewer bytes, and back.
May touch: the arrays it is given.
Must never: lose a bit, own memory, or choose where bytes live.
"""
