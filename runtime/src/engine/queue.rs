//! Requests that wait for admission: first in, first out inside a fair-share key, deficit round robin between keys.
//!
//! A key's account falls by each token that it is served and rises by a quantum each time its turn
//! comes round; the key whose account is positive first is next. What is next does not change until it
//! is taken, charged or removed, so a request too large for the moment is waited for, not passed.

use std::collections::{HashMap, VecDeque};

/// Waiting entries of one key, and its account.
#[derive(Debug)]
struct Lane<T> {
    account: i64,
    entries: VecDeque<T>,
    /// Admitted and not done: the account is kept while there is any.
    running: u32,
}

/// The waiting queue.
#[derive(Debug)]
pub(super) struct FairQueue<T> {
    quantum: i64,
    lanes: HashMap<u64, Lane<T>>,
    /// Keys with waiting entries, next turn first.
    turns: VecDeque<u64>,
    len: usize,
}

impl<T> FairQueue<T> {
    pub(super) fn new(quantum: u32) -> Self {
        Self { quantum: i64::from(quantum.max(1)), lanes: HashMap::new(), turns: VecDeque::new(), len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends an entry to its key's line.
    pub(super) fn push(&mut self, key: u64, entry: T) {
        let lane = self.lanes.entry(key).or_insert_with(|| Lane { account: 0, entries: VecDeque::new(), running: 0 });
        if lane.entries.is_empty() {
            self.turns.push_back(key);
        }
        lane.entries.push_back(entry);
        self.len += 1;
    }

    /// The entry whose turn it is.
    pub(super) fn peek(&mut self) -> Option<&mut T> {
        self.settle_turn();
        self.front()?.entries.front_mut()
    }

    /// Takes the entry whose turn it is; its key counts as running until [`FairQueue::done`].
    pub(super) fn pop(&mut self) -> Option<T> {
        self.settle_turn();
        let key = *self.turns.front()?;
        let lane = self.lanes.get_mut(&key)?;
        let entry = lane.entries.pop_front()?;
        lane.running += 1;
        if lane.entries.is_empty() {
            self.turns.pop_front();
        }
        self.len -= 1;
        Some(entry)
    }

    /// Books tokens served to a key; negative gives back what was booked ahead.
    pub(super) fn charge(&mut self, key: u64, tokens: i64) {
        if let Some(lane) = self.lanes.get_mut(&key) {
            lane.account -= tokens;
        }
    }

    /// Ends what [`FairQueue::pop`] began. A key with nothing waiting or running is forgotten.
    pub(super) fn done(&mut self, key: u64) {
        if let Some(lane) = self.lanes.get_mut(&key) {
            lane.running -= 1;
            self.forget_if_idle(key);
        }
    }

    /// Every waiting entry, in no particular order of keys.
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.turns.iter().filter_map(|key| self.lanes.get(key)).flat_map(|lane| &lane.entries)
    }

    /// Removes the entries that `gone` names and hands them to `take`.
    pub(super) fn remove_if(&mut self, mut gone: impl FnMut(&T) -> bool, mut take: impl FnMut(T)) {
        for key in std::mem::take(&mut self.turns) {
            let Some(lane) = self.lanes.get_mut(&key) else { continue };
            for _ in 0..lane.entries.len() {
                let Some(entry) = lane.entries.pop_front() else { break };
                if gone(&entry) {
                    self.len -= 1;
                    take(entry);
                } else {
                    lane.entries.push_back(entry);
                }
            }
            if lane.entries.is_empty() {
                self.forget_if_idle(key);
            } else {
                self.turns.push_back(key);
            }
        }
    }

    /// Turns the ring until a key with a positive account is in front; a key earns its quantum by coming to the front.
    fn settle_turn(&mut self) {
        let quantum = self.quantum;
        let rounds = self.turns.iter().filter_map(|key| self.lanes.get(key)).map(|lane| rounds_to_positive(lane.account, quantum)).min();
        let skipped = rounds.unwrap_or(0).saturating_sub(1);
        if skipped > 0 {
            for key in &self.turns {
                self.lanes.get_mut(key).expect("a key with a turn has a lane").account += skipped * quantum;
            }
        }
        while self.front().is_some_and(|lane| lane.account <= 0) {
            self.turns.rotate_left(1);
            if let Some(lane) = self.front() {
                lane.account += quantum;
            }
        }
    }

    fn front(&mut self) -> Option<&mut Lane<T>> {
        self.lanes.get_mut(self.turns.front()?)
    }

    fn forget_if_idle(&mut self, key: u64) {
        if self.lanes.get(&key).is_some_and(|lane| lane.entries.is_empty() && lane.running == 0) {
            self.lanes.remove(&key);
        }
    }
}

/// Quanta that lift an account above zero.
fn rounds_to_positive(account: i64, quantum: i64) -> i64 {
    if account > 0 { 0 } else { -account / quantum + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admit(queue: &mut FairQueue<(u64, i64)>, count: usize) -> Vec<u64> {
        let mut order = Vec::new();
        for _ in 0..count {
            let Some((key, cost)) = queue.pop() else { break };
            queue.charge(key, cost);
            order.push(key);
        }
        order
    }

    #[test]
    fn one_key_is_first_in_first_out() {
        let mut queue = FairQueue::new(10);
        for cost in [5, 500, 1] {
            queue.push(7, (7, cost));
        }
        let costs: Vec<i64> = std::iter::from_fn(|| queue.pop()).map(|(_, cost)| cost).collect();
        assert_eq!(costs, [5, 500, 1]);
    }

    #[test]
    fn keys_take_turns_by_tokens_not_by_requests() {
        let mut queue = FairQueue::new(10);
        for _ in 0..4 {
            queue.push(1, (1, 30));
        }
        for _ in 0..12 {
            queue.push(2, (2, 10));
        }
        let order = admit(&mut queue, 12);
        let served = |key| order.iter().filter(|found| **found == key).count() as i64;
        assert!((served(1) * 30 - served(2) * 10).abs() <= 40, "{order:?}");
    }

    #[test]
    fn a_late_key_does_not_wait_for_an_early_flood() {
        let mut queue = FairQueue::new(10);
        for _ in 0..100 {
            queue.push(1, (1, 50));
        }
        admit(&mut queue, 10);
        queue.push(2, (2, 50));
        assert!(admit(&mut queue, 2).contains(&2));
    }

    #[test]
    fn peek_and_pop_agree_and_what_waits_is_not_passed() {
        let mut queue = FairQueue::new(10);
        queue.push(1, (1, 1000));
        queue.push(2, (2, 1));
        let first = *queue.peek().unwrap();
        assert_eq!(*queue.peek().unwrap(), first);
        assert_eq!(queue.pop(), Some(first));
    }

    #[test]
    fn removed_entries_leave_the_others_in_order() {
        let mut queue = FairQueue::new(10);
        for cost in 0..6 {
            queue.push(cost as u64 % 2, (cost as u64 % 2, cost));
        }
        let mut removed = Vec::new();
        queue.remove_if(|(_, cost)| cost % 3 == 0, |(_, cost)| removed.push(cost));
        removed.sort_unstable();
        assert_eq!((removed, queue.len(), queue.iter().count()), (vec![0, 3], 4, 4));
        queue.remove_if(|_| true, |_| {});
        assert!(queue.is_empty() && queue.pop().is_none() && queue.lanes.is_empty());
    }

    #[test]
    fn an_idle_key_is_forgotten() {
        let mut queue = FairQueue::new(10);
        queue.push(1, (1, 5));
        queue.pop();
        queue.charge(1, 1_000_000);
        assert_eq!(queue.lanes.len(), 1, "the account is kept while it runs");
        queue.done(1);
        assert!(queue.lanes.is_empty());
    }
}
