//! Paged attention.

use super::*;
use crate::device::cpu::kernels::attend::{AttendBounds, AttendCall, AttendScratch, attend};
use crate::device::cpu::kv::PlaneRef;
use crate::device::reference::{self, AttendInputs};
use crate::device::tolerance::CPU_ATTEND;
use oxide_bundle::contract::Heads;

struct Cache {
    heads: Heads,
    pages: usize,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Cache {
    /// A cache whose values are bf16 numbers, so that both element types hold the same.
    fn new(heads: Heads, pages: usize, random: &mut Random) -> Self {
        let len = pages * (heads.page_tokens * heads.kv * heads.dim) as usize;
        let mut plane = || widen(&random.bf16s(len));
        Self { heads, pages, k: plane(), v: plane() }
    }
}

/// Sequences of a step: queries and visible tokens of each.
struct Batch {
    query_starts: Vec<u32>,
    kv_lens: Vec<u32>,
    block_tables: Vec<u32>,
    stride: usize,
    q: Vec<f32>,
}

impl Batch {
    fn new(cache: &Cache, seqs: &[(usize, usize)], random: &mut Random) -> Self {
        let heads = cache.heads;
        let page_tokens = heads.page_tokens as usize;
        let stride = seqs.iter().map(|(_, kv_len)| kv_len.div_ceil(page_tokens)).max().unwrap_or(0) + 1;
        let mut pages: Vec<u32> = (0..cache.pages as u32).collect();
        random.shuffle(&mut pages);
        let mut free = pages.into_iter();
        let (mut query_starts, mut kv_lens, mut block_tables) = (vec![0], Vec::new(), Vec::new());
        let mut rows = 0;
        for (queries, kv_len) in seqs {
            rows += queries;
            query_starts.push(rows as u32);
            kv_lens.push(*kv_len as u32);
            let used = kv_len.div_ceil(page_tokens);
            block_tables.extend(free.by_ref().take(used));
            block_tables.extend(std::iter::repeat_n(0, stride - used));
        }
        assert_eq!(block_tables.len(), stride * seqs.len(), "the test's cache is too small");
        Self { query_starts, kv_lens, block_tables, stride, q: random.f32s(rows * (heads.q * heads.dim) as usize) }
    }

    fn run(&self, kernels: &Kernels, cache: &Cache, threads: usize, is_bf16: bool) -> Vec<f32> {
        let heads = cache.heads;
        let bounds = AttendBounds {
            tokens: self.q.len() / (heads.q * heads.dim) as usize,
            seqs: self.kv_lens.len(),
            context: self.stride * heads.page_tokens as usize,
            q_heads: heads.q as usize,
            kv_heads: heads.kv as usize,
            head_dim: heads.dim as usize,
            threads,
        };
        let narrow = |plane: &[f32]| plane.iter().map(|value| to_bf16(*value)).collect::<Vec<_>>();
        let (k16, v16) = (narrow(&cache.k), narrow(&cache.v));
        let (k_plane, v_plane) =
            if is_bf16 { (PlaneRef::Bf16(&k16), PlaneRef::Bf16(&v16)) } else { (PlaneRef::F32(&cache.k), PlaneRef::F32(&cache.v)) };
        let mut out = vec![f32::NAN; self.q.len()];
        let call = AttendCall {
            q_heads: heads.q as usize,
            kv_heads: heads.kv as usize,
            head_dim: heads.dim as usize,
            page_tokens: heads.page_tokens as usize,
            x: &self.q,
            k_plane,
            v_plane,
            query_starts: &self.query_starts,
            kv_lens: &self.kv_lens,
            block_tables: &self.block_tables,
            table_stride: self.stride,
            out: &mut out,
            scratch: &mut AttendScratch::new(bounds),
        };
        attend(kernels, &mut pool(threads), call);
        out
    }

    fn wanted(&self, cache: &Cache) -> Vec<f64> {
        reference::attend(AttendInputs {
            heads: cache.heads,
            q: &self.q,
            k_plane: &cache.k,
            v_plane: &cache.v,
            query_starts: &self.query_starts,
            kv_lens: &self.kv_lens,
            block_tables: &self.block_tables,
            table_stride: self.stride,
        })
    }
}

#[test]
fn matches_the_reference() {
    let mut random = Random(1);
    let shapes =
        [(9, 3, 64, 16), (8, 1, 128, 1), (4, 4, 64, 7), (12, 2, 128, 64), (7, 1, 16, 32), (5, 1, 80, 16), (2, 2, 256, 16), (32, 1, 16, 16)];
    let batches: [&[(usize, usize)]; 5] =
        [&[(1, 1)], &[(1, 300)], &[(1, 128), (1, 129), (1, 5)], &[(33, 33), (1, 200), (17, 140), (0, 9), (2, 130)], &[(130, 260)]];
    for (q, kv, dim, page_tokens) in shapes {
        let heads = Heads { q, kv, dim, page_tokens };
        let cache = Cache::new(heads, 1024_usize.div_ceil(page_tokens as usize), &mut random);
        for seqs in batches {
            let batch = Batch::new(&cache, seqs, &mut random);
            let wanted = batch.wanted(&cache);
            for (isa, kernels) in all_kernels() {
                let found = batch.run(kernels, &cache, 2, false);
                assert_close(&found, &wanted, |_| CPU_ATTEND, &format!("{isa} {heads} {seqs:?}"));
                assert_eq!(bits(&found), bits(&batch.run(kernels, &cache, 1, true)), "{isa} {heads} {seqs:?}: bf16 planes of equal values");
            }
        }
    }
}

#[test]
fn a_query_does_not_depend_on_chunks_batch_or_split() {
    let mut random = Random(2);
    for (q, kv, dim, page_tokens) in [(9, 3, 64, 16), (8, 1, 128, 5), (4, 4, 32, 64)] {
        let heads = Heads { q, kv, dim, page_tokens };
        let cache = Cache::new(heads, 1024_usize.div_ceil(page_tokens as usize), &mut random);
        let length = 400;
        let whole = Batch::new(&cache, &[(length, length)], &mut random);
        let width = (q * dim) as usize;
        for (isa, kernels) in all_kernels() {
            let wanted = whole.run(kernels, &cache, 2, false);
            let part = |first: usize, rows: usize| Batch {
                query_starts: vec![0, rows as u32],
                kv_lens: vec![(first + rows) as u32],
                block_tables: whole.block_tables.clone(),
                stride: whole.stride,
                q: whole.q[first * width..(first + rows) * width].to_vec(),
            };
            for (first, rows) in [(0, 1), (127, 1), (128, 1), (399, 1), (0, 130), (126, 5), (255, 100), (13, 13)] {
                for threads in [1, 2, 5] {
                    let found = part(first, rows).run(kernels, &cache, threads, false);
                    let wanted = &wanted[first * width..(first + rows) * width];
                    assert_eq!(bits(&found), bits(wanted), "{isa} {heads}: rows {first}.. {rows}, {threads} threads");
                }
            }
            // Many neighbours, so that long sequences are not split.
            let mut crowd = part(399, 1);
            for _ in 0..40 {
                crowd.query_starts.push(crowd.query_starts.len() as u32);
                crowd.kv_lens.push(3);
                crowd.block_tables.extend_from_slice(&whole.block_tables);
                crowd.q.extend(random.f32s(width));
            }
            let found = crowd.run(kernels, &cache, 2, false);
            assert_eq!(bits(&found[..width]), bits(&wanted[399 * width..]), "{isa} {heads}: in a crowd");
        }
    }
}
