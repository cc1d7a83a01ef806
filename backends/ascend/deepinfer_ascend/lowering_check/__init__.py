"""The lowering check: does every Triton kernel that this driver may take reach the form that CANN compiles for a 950?

``python -m deepinfer_ascend.lowering_check --report FILE.json --tools FOLDER``; ``.ci/ascend_tools FOLDER`` unpacks the
two tools. It needs Triton, and neither CANN nor a device. What goes well is "lowered", never "compiled": the last step,
``hivmc-a5``, is CANN's alone.
"""
