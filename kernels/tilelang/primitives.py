"""Types, pass configurations and the data-movement primitives that TileLang cannot spell.

All inline PTX of the project is in this file, and it moves data or synchronises: arithmetic stays
TileLang. `T.import_source(BULK)` makes a group of primitives known to a kernel.
"""

import toolchain  # noqa: F401  (prepares the process; must come before tilelang)
import tilelang.language as T

BF16, F32, I32, I64, U32, U64 = "bfloat16", "float32", "int32", "int64", "uint32", "uint64"
VEC = 8
"""BF16 values in one 16-byte access."""
WARP = 32

PLAIN = {"tl.disable_safe_memory_legalize": True}
"""Bounds are checked by the kernel itself."""
THREADED = PLAIN | {
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.disable_data_race_check": True,
}
"""The kernel is written thread by thread and places its own barriers."""

TRANSPOSE = r"""
// Transposes two 8x8 matrices of 16-bit elements held by a warp, one register a matrix.
__device__ __forceinline__ void ox_transpose_pair(void* pair) {
  unsigned* r = (unsigned*)pair;
  unsigned low = r[0], high = r[1];
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(low) : "r"(low));
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(high) : "r"(high));
  r[0] = low;
  r[1] = high;
}
"""

BULK = r"""
__device__ __forceinline__ unsigned ox_shared(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// A barrier that one arrival and its announced bytes complete.
__device__ __forceinline__ void ox_barrier_init(void* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ox_shared(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to bulk copies.
__device__ __forceinline__ void ox_barrier_publish() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void ox_barrier_arrive(void* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ox_shared(barrier)) : "memory");
}

__device__ __forceinline__ void ox_barrier_wait(void* barrier, unsigned parity) {
  asm volatile("{\n.reg .pred p;\nAGAIN%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE%=;\nbra AGAIN%=;\nDONE%=:\n}"
               ::"r"(ox_shared(barrier)), "r"(parity) : "memory");
}

// Contiguous bytes from global to shared memory without passing registers or blocking the warp.
__device__ __forceinline__ void ox_bulk_load(void* to, const void* from, unsigned bytes, void* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ox_shared(barrier)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(ox_shared(to)), "l"(from), "r"(bytes), "r"(ox_shared(barrier)), "l"(0x12F0000000000000ull /* evict first: a weight is read once a step */) : "memory");
}
"""

CLUSTER = r"""
// Four floats from the shared memory of another block of the cluster.
__device__ __forceinline__ void ox_cluster_load4(void* to, const void* from, unsigned rank) {
  unsigned local = (unsigned)__cvta_generic_to_shared(from), remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remote) : "memory");
  *(float4*)to = v;
}
"""


def round_up(value, multiple):
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


def extern(name, *arguments):
    """A call of a primitive."""
    return T.call_extern("handle", name, *arguments)


@T.macro
def mma_16x8x16(a, a_at, b, b_at, c, c_at):
    """`c += a · b` of one warp on registers: BF16 16 × 16 by 16 × 8, F32 accumulators."""
    T.ptx_mma("float32", "m16n8k16", "row", "col", "bf16", "bf16", "fp32", a.data, a_at, b.data, b_at, c.data, c_at, T.bool(False))
