"""Every kernel, in every form that can be selected at run time, compiled for GPUs that are not here.

python -m deepinfer_nvidia.compile_check --arch sm_100a --arch sm_90a --report FILE.json
"""
