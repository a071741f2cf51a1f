//! Who gets pages: admission by proof or by prompt, prefix hits, reservations, preemption, release.
//!
//! **Invariant:** pages available (free or cached) are never fewer than `reserved`, the pages that
//! proven sequences may still take. So a proven sequence always gets its page.

use super::api::EngineEvent;
use super::core::Core;
use super::group::Group;
use super::pager::Pager;
use super::request::{kv_positions, worst_pages};
use super::sequence::{History, PageKeys, Sequence, Source, make_masks};
use std::time::Instant;

/// Prefix pages found for a sequence.
#[derive(Debug, Default)]
struct Hits {
    pages: Vec<u32>,
    /// Those that nobody refers to: taking them makes fewer pages available.
    idle: u32,
}

impl Core {
    /// Admits what fits beside the running sequences: first the preempted, then the queue, in order.
    pub(super) fn admit(&mut self) {
        self.rounds += 1;
        if self.preempted.is_empty() && self.queue.is_empty() {
            return;
        }
        let decodes = self.running.iter().filter(|slot| self.seqs[**slot].is_decode()).count() as u32;
        let prefill = self.running.iter().map(|slot| &self.seqs[*slot]).filter(|seq| !seq.is_decode());
        let prefill: u32 = prefill.map(Sequence::remaining).fold(0, u32::saturating_add);
        let mut room = self.scheduler.prefill_room(decodes).saturating_sub(prefill);
        while room > 0 {
            let placed = if self.preempted.is_empty() { self.admit_next() } else { self.resume_next() };
            match placed {
                Some(tokens) => room = room.saturating_sub(tokens),
                None => {
                    self.crowded = !self.preempted.is_empty() || !self.queue.is_empty();
                    return;
                }
            }
        }
        let width = if self.preempted.is_empty() { self.queue.peek().map_or(0, |group| group.request.n) } else { 1 };
        self.crowded = self.active_seqs + width > self.seqs_max;
    }

    /// Places the next waiting request; its tokens to compute, or `None` if there is none or it does not fit.
    fn admit_next(&mut self) -> Option<u32> {
        let width = self.queue.peek()?.request.n;
        if self.active_seqs + width > self.seqs_max {
            return None;
        }
        let proven = !self.overcommit || width > 1;
        let (pager, page_tokens, cache) = (&self.pager, self.page_tokens as usize, self.prefix_cache);
        let group = self.queue.peek()?;
        let usable = if group.request.prompt_logprobs.is_some() || !cache { 0 } else { group.request.prompt.len() - 1 };
        let hits = find_hits(pager, &mut group.keys, &group.request.prompt, usable / page_tokens, page_tokens);
        let need = first_need(group, proven, self.page_tokens).saturating_sub(hits.pages.len() as u32);
        if !self.has_room(&hits, need) {
            return None;
        }
        let group = self.queue.pop()?;
        Some(self.enter(group, hits, if proven { need } else { 0 }, proven))
    }

    /// Turns a waiting request into a running sequence.
    fn enter(&mut self, mut group: Group, hits: Hits, reserve: u32, proven: bool) -> u32 {
        let request = &group.request;
        let cached_tokens = hits.pages.len() as u32 * self.page_tokens;
        self.entered.push((group.place, request.prompt.len() as u64, u64::from(request.n)));
        self.stats.admitted += 1;
        self.stats.prefix_queries += request.prompt.len() as u64;
        self.stats.prefix_hits += u64::from(cached_tokens);
        group.advance = request.max_tokens.min(self.shared.options.fair_quantum_tokens);
        let ahead = u64::from(group.prompt_tokens() - cached_tokens) + u64::from(group.advance) * u64::from(request.n);
        self.queue.charge(request.fair_key, ahead as i64);
        group.admitted = Some(self.now);
        group.cached_tokens = cached_tokens;
        group.order = self.next_serial();
        if let Some(deadline) = request.deadline {
            self.look_again_at(deadline);
        }
        if !group.events.send(EngineEvent::Admitted { cached_tokens }, group.open.len()) {
            self.shared.give_up(&group.cancel);
        }
        let seq = first_sequence(&group, self.now);
        let group_slot = self.groups.insert(group);
        let slot = self.seqs.insert(Sequence { group: group_slot, proven, ..seq });
        self.start(slot, hits, reserve)
    }

    /// Places the oldest preempted sequence again.
    fn resume_next(&mut self) -> Option<u32> {
        let slot = *self.preempted.first()?;
        if self.active_seqs + 1 > self.seqs_max {
            return None;
        }
        let (page_tokens, cache) = (self.page_tokens as usize, self.prefix_cache);
        let seq = self.seqs.get_mut(slot)?;
        let group = &self.groups[seq.group];
        let unscored = if group.request.prompt_logprobs.is_some() { seq.scored as usize } else { usize::MAX };
        let usable = if cache { (seq.tokens.len() - 1).min(unscored) } else { 0 };
        let hits = find_hits(&self.pager, &mut seq.keys, &seq.tokens, usable / page_tokens, page_tokens);
        let worst = kv_positions(&group.request);
        let positions = if seq.proven { worst } else { worst.min(seq.tokens.len() as u64 + 1) };
        let need = (positions.div_ceil(page_tokens as u64) as u32).saturating_sub(hits.pages.len() as u32);
        let reserve = if seq.proven { need } else { 0 };
        if !self.has_room(&hits, need) {
            return None;
        }
        self.preempted.remove(0);
        Some(self.start(slot, hits, reserve))
    }

    /// Whether `need` pages are there beside the hits and everybody's reservations.
    fn has_room(&self, hits: &Hits, need: u32) -> bool {
        u64::from(self.pager.available()) >= u64::from(self.reserved) + u64::from(hits.idle) + u64::from(need)
    }

    /// Gives a sequence its hits and its reservation and lets it run.
    fn start(&mut self, slot: u32, hits: Hits, reserve: u32) -> u32 {
        for page in &hits.pages {
            self.pager.retain(*page);
        }
        let serial = self.next_serial();
        self.reserved += reserve;
        let seq = &mut self.seqs[slot];
        let found = hits.pages.len() as u32;
        seq.pages = hits.pages;
        seq.published = found;
        (seq.computed, seq.committed) = (found * self.page_tokens, found * self.page_tokens);
        (seq.serial, seq.reserve, seq.held_at) = (serial, reserve, self.now);
        let (width, order, remaining) = (seq.width(), seq.order, seq.remaining());
        self.active_seqs += width;
        let place = self.running.partition_point(|other| self.seqs[*other].order <= order);
        self.running.insert(place, slot);
        remaining
    }

    /// Gives `slot` pages until it holds `pages`; `false` if the pool is exhausted (over-commit only).
    pub(super) fn grow(&mut self, slot: u32, pages: u32) -> bool {
        let seq = &mut self.seqs[slot];
        if seq.pages.len() as u32 >= pages {
            return true;
        }
        seq.hold(self.now);
        while (seq.pages.len() as u32) < pages {
            if seq.reserve > 0 {
                seq.reserve -= 1;
                self.reserved -= 1;
            } else {
                assert!(!seq.proven, "a proven sequence outgrew its worst case");
                if self.pager.available() <= self.reserved {
                    return false;
                }
            }
            seq.pages.push(self.pager.alloc().expect("available pages cover what is reserved"));
        }
        true
    }

    /// Takes the pages of the youngest sequence that may be preempted and queues it for recompute.
    /// Nothing may be in flight. The slot, or `None` if there is none.
    pub(super) fn preempt_youngest(&mut self) -> Option<u32> {
        let slot = *self.running.iter().rev().find(|slot| !self.seqs[**slot].proven)?;
        self.running.retain(|other| *other != slot);
        self.release_pages(slot);
        self.stats.preemptions += 1;
        let seq = &mut self.seqs[slot];
        seq.preemptions += 1;
        seq.proven = seq.preemptions >= self.shared.options.preemptions_max;
        self.active_seqs -= seq.width();
        let order = seq.order;
        let place = self.preempted.partition_point(|other| self.seqs[*other].order <= order);
        self.preempted.insert(place, slot);
        tracing::debug!(slot, order, "preempted");
        Some(slot)
    }

    /// Gives back pages and reservation. Deepest pages first, so that a prefix is evicted from its end.
    pub(super) fn release_pages(&mut self, slot: u32) {
        let seq = &mut self.seqs[slot];
        seq.hold(self.now);
        self.reserved -= std::mem::take(&mut seq.reserve);
        for page in seq.pages.drain(..).rev() {
            self.pager.release(page);
        }
        (seq.computed, seq.committed, seq.published) = (0, 0, 0);
    }

    /// Makes the full pages whose content is certain findable.
    pub(super) fn publish_pages(&mut self, slot: u32) {
        if !self.prefix_cache {
            return;
        }
        let page_tokens = self.page_tokens as usize;
        let seq = &mut self.seqs[slot];
        let full = (seq.committed as usize).min(seq.tokens.len()) / page_tokens;
        for index in seq.published as usize..full {
            let (key, parent) = seq.keys.of(index, &seq.tokens, page_tokens);
            let tokens = &seq.tokens[index * page_tokens..(index + 1) * page_tokens];
            self.pager.publish(seq.pages[index], key, parent, tokens);
        }
        seq.published = seq.published.max(full as u32);
    }

    pub(super) fn next_serial(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }
}

/// Longest run of published pages that `tokens` begin with, `pages_max` at most.
fn find_hits(pager: &Pager, keys: &mut PageKeys, tokens: &[u32], pages_max: usize, page_tokens: usize) -> Hits {
    let mut hits = Hits::default();
    for index in 0..pages_max {
        let (key, parent) = keys.of(index, tokens, page_tokens);
        let Some(page) = pager.lookup(&key, &parent, &tokens[index * page_tokens..(index + 1) * page_tokens]) else { break };
        hits.idle += u32::from(pager.is_idle(page));
        hits.pages.push(page);
    }
    hits
}

/// Pages to have before a request runs: its worst case, or the prompt and one token.
fn first_need(group: &Group, proven: bool, page_tokens: u32) -> u32 {
    let worst = worst_pages(&group.request, page_tokens);
    if proven { worst } else { worst.min((group.prompt_tokens() + 1).div_ceil(page_tokens)) }
}

/// The sequence that computes a prompt for all choices.
fn first_sequence(group: &Group, now: Instant) -> Sequence {
    let request = &group.request;
    Sequence {
        group: 0,
        choice: 0,
        serial: 0,
        order: group.order,
        tokens: request.prompt.clone(),
        prompt_tokens: group.prompt_tokens(),
        computed: 0,
        committed: 0,
        pending: 0,
        source: Source { step: 0, row: 0 },
        pages: Vec::new(),
        keys: group.keys.clone(),
        published: 0,
        reserve: 0,
        proven: false,
        forks: request.n - 1,
        masks: make_masks(request),
        history: History::of(request),
        scored: 0,
        first_token: None,
        last_token: None,
        held_at: now,
        page_seconds: 0.0,
        preemptions: 0,
    }
}
