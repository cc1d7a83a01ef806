"""The call check: every call into torch-npu, tried against the real schemas without a device.

``python -m deepinfer_ascend.call_check --report FILE.json`` calls each operator of `deepinfer_ascend.operators`, and
each native op of the driver, on meta tensors; with ``--host-cann`` also on an emulated device. It proves argument
names, dtypes, shapes and, emulated, that the calls reach the runtime; it proves nothing about results.
"""
