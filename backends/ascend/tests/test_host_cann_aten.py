"""Plain operators of torch on the emulated device give what the CPU gives, results and in-place effects."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from host_cann import Emulator
from torch import Tensor
from torch.nn import functional as F

EXPRESSIONS = """
x+i; x-y; x-1; 1-x; x+2.5; x*y; x*2; x/y; x/2; 2/x; x//2; x//y; i%3; i%j; x%2.0; x**2; x.abs()**y; 2.0**x; x.exp()
x.exp2(); x.abs().log(); x.abs().log2(); x.abs().log1p(); x.expm1(); x.abs().sqrt(); x.abs().rsqrt(); x.reciprocal()
x.abs(); -i; x.sin(); x.cos(); x.tanh(); x.sigmoid(); F.silu(x); F.softplus(x); F.relu(x); F.gelu(x); F.logsigmoid(x)
x.floor(); x.ceil(); x.round(); x.trunc(); x.sign(); x.erf(); torch.maximum(x,y); torch.minimum(x,y)
torch.logaddexp(x,y); torch.atan2(x,y); x.clamp(min=0.1); x.clamp(max=0.1); x.clamp(-1,1); x.clamp(min=y)
x.clamp_(-1,1); x==y; x!=y; x<y; x<=y; x>y; x>=y; x==1; x!=1; x<1; x<=1; x>1; x>=1; m&m; m|m; m^m; ~m; ~i; i&j; i|j
i^j; i&3; i|3; i^3; i<<2; i>>2; i<<j; i>>j; torch.logical_and(m,m); torch.logical_or(m,m); torch.logical_not(m)
torch.logical_xor(m,m); torch.isnan(x); torch.isinf(x); torch.isfinite(x); torch.where(m,x,y); torch.where(m,x,0.0)
x.masked_fill(m,1.0); x.masked_fill_(m,float('-inf')); x.to(torch.bfloat16); b.float(); x.to(torch.float8_e4m3fn)
x.to(torch.int64); i.bool(); u.int(); x.half(); x.t().contiguous(); x.t().clone(); x.t(); x.copy_(y); x.copy_(i)
x[:,1:3].copy_(y[:,1:3]); x.fill_(2); x.zero_(); x.add_(1); x.add_(y); x.add_(y,alpha=2); x.sub_(y); x.mul_(2)
x.mul_(y)
x.div_(2); x.div_(y); x.neg_(); x.exp_(); x.pow_(2); x.round_(); i.bitwise_and_(j); i.bitwise_or_(j)
torch.zeros(3,device=d); torch.ones(3,device=d); torch.full((3,),2.0,device=d); torch.full((3,),True,device=d)
torch.zeros_like(x); torch.ones_like(x); torch.full_like(x,3); torch.arange(5,device=d); torch.arange(1,9,2,device=d)
torch.linspace(0,1,5,device=d); torch.eye(3,device=d); torch.tensor([1,2],device=d); x.sum(); x.sum(-1); m.sum()
x.sum((0,1),keepdim=True); i.sum(dim=0); x.mean(); x.mean(-1,keepdim=True); x.max(); x.max(-1); x.min(0); x.amax(-1)
x.amin(-1,keepdim=True); x.argmax(-1); x.argmin(); x.prod(-1); x.norm(); x.var(-1); x.std(-1); x.any(); m.any(-1)
m.all(); m.all(-1); torch.count_nonzero(m); x.cumsum(-1); i.cumsum(0); m.cumsum(-1); x.cumprod(-1)
torch.logsumexp(x,-1); x.softmax(-1); F.log_softmax(x,-1); x.topk(2); x.topk(2,-1,False); x.sort(-1)
x.argsort(-1); torch.argsort(x,-1,True); torch.unique(i); i.unique(return_inverse=True); torch.bincount(i.flatten())
m.nonzero(); torch.nonzero(m,as_tuple=True); x[m]; x[k]; x[:,k]; x[k,k]; x[k,:,None]; x[m.any(-1)]; x[1]; x[i[0,0]]
x.index_select(0,k); x.gather(1,i); x.take_along_dim(i,1); x.scatter(1,i,y); x.scatter_(1,i,1.0)
x.scatter_add_(1,i,y); x.index_add_(0,k,y[:3]); x.index_copy_(0,k,y[:3]); x.index_fill_(0,k,1.0)
x.index_put_((k,),y[:3]); x.__setitem__(k,y[:3]); x.__setitem__((k,k),y[0,:3]); x.__setitem__(m,1.0)
x.__setitem__(m,y[m]); x.__setitem__(k,0.0); x.__setitem__((slice(None),k),0.0); x.__setitem__(1,0.0)
x.index_put_((k,),y[:3],accumulate=True); x.masked_select(m); x.masked_scatter(m,y); torch.take(x,i); torch.cat([x,y])
torch.cat([x,y],-1); torch.cat([x,i],-1); torch.stack([x,y]); x.repeat(2,1); x.repeat_interleave(2,0)
x.expand(2,4,6).contiguous(); x.roll(1,0); x.flip(-1); x.tril(); x.triu(1); F.pad(x,(0,2)); F.pad(x,(1,2),value=1.0)
F.one_hot(i); F.embedding(i,y); x.unfold(0,2,1); torch.outer(x[0],y[0]); x@y.t(); x.mm(y.t()); b@b.t(); x@x[0]
x[0].dot(y[0]); torch.bmm(x[None],y.t()[None]); x[None]@y.t(); x.expand(3,4,6)@y.t(); torch.addmm(x,x[:,:4],y)
torch.baddbmm(x[None],x[None,:,:4],y[None]); F.linear(x,y); F.linear(b,b); F.linear(b,b,b[:,0])
torch.einsum('td,sd->ts',x,y); F.rms_norm(x,(6,)); torch.searchsorted(x.sort(-1)[0],y); torch.isin(i,k)
torch.bucketize(x,x[0].sort()[0]); torch.equal(x,y); torch.allclose(x,y); x.isclose(y); x[0,0].item(); x.tolist()
bool(m.any()); x.view(torch.int32)>>23; x.view(torch.uint8)+1; torch.addcmul(x,x,y,value=2); torch.addcdiv(x,x,y)
torch.lerp(x,y,0.5); x.nan_to_num(0.0); torch.div(x,y,rounding_mode='floor'); torch.div(i,3,rounding_mode='floor')
torch.div(i,3,rounding_mode='trunc'); i//3; i//j; torch.fmod(x,2); torch.sub(x,y,alpha=2); F.glu(x); x.cummax(-1)
x.kthvalue(2); x.median(-1); x.diff()
"""
LINES = [line.strip() for line in EXPRESSIONS.replace("\n", ";").split(";") if line.strip()]


def operands(device: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
    i = torch.randint(0, 4, (4, 6), generator=generator)
    j = torch.randint(1, 4, (4, 6), generator=generator)
    plain = {
        "x": x,
        "y": y,
        "b": x.bfloat16(),
        "i": i,
        "j": j,
        "m": x > 0,
        "u": i.to(torch.uint8),
        "k": torch.tensor([0, 2, 1]),
    }
    return {"d": device} | {name: tensor.to(device) for name, tensor in plain.items()}


def flattened(value: object) -> list[object]:
    if isinstance(value, (tuple, list)):
        return [item for each in value for item in flattened(each)]
    return [value.cpu().double() if isinstance(value, Tensor) else value]


def evaluated(line: str, device: str) -> list[object]:
    names = operands(device)
    result = eval(line, {"torch": torch, "F": F}, names)  # noqa: S307 (the lines above)
    return flattened([result, [names[name] for name in "xyijmu"]])


@pytest.mark.parametrize("line", LINES)
def test_the_device_computes_what_the_cpu_computes(host_cann_machine: Emulator, line: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_npu warns of operators that are slow or fall back
        on_cpu, on_npu = evaluated(line, "cpu"), evaluated(line, "npu:0")
    torch.testing.assert_close(on_npu, on_cpu, rtol=1e-5, atol=1e-6, equal_nan=True)
