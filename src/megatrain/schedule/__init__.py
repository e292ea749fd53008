"""Room card of the schedule.

Holds:         Plan, Op, Place, Schedule; build, waits, text, check, liveness, simulate.
Takes -> gives: Plan, program, number of micro-batches -> a tuple of ops that any device can execute.
May touch:     nothing outside its arguments; every function is pure.
Must never:    know a device, a size or a duration; import torch.
"""
