//! The KV pager: which page holds what, who refers to it, and which prefixes can be found again.
//!
//! A page is in exactly one state:
//!
//! ```text
//!   free ──alloc──▶ in use ──release, published──▶ cached ──evict (oldest first)──▶ free
//!     ▲               │  ▲                            │
//!     └──release──────┘  └───────────retain───────────┘
//! ```
//!
//! A pinned page is evicted only when no other page is left: pinning makes nothing unavailable.
//!
//! **Invariants.** `free + cached + in_use == total`. A published page is never written again: its
//! content and its key stay together until it is evicted. A hit compares the tokens and the parent's
//! key, not the hash alone. The pager knows no clock, no device and no sequence.

use sha2::{Digest, Sha256};
use std::collections::HashMap;

/// Identity of a page's content and of everything before it.
pub(super) type PageKey = [u8; 32];

const NO_PAGE: u32 = u32::MAX;

/// Key before the first page. Different salts share nothing.
pub(super) fn root_key(salt: &[u8]) -> PageKey {
    Sha256::new().chain_update(b"oxide kv prefix\0").chain_update(salt).finalize().into()
}

/// Key of a full page that holds `tokens` after the pages that `parent` stands for.
pub(super) fn page_key(parent: &PageKey, tokens: &[u32]) -> PageKey {
    Sha256::new().chain_update(parent).chain_update(bytemuck::cast_slice(tokens)).finalize().into()
}

/// Pages by state.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct PageCounts {
    pub(super) free: u32,
    pub(super) cached: u32,
    pub(super) in_use: u32,
}

#[derive(Copy, Clone, Debug)]
struct Page {
    refs: u32,
    /// How often it is pinned.
    pins: u32,
    /// Neighbours in its list of cached pages, oldest first.
    older: u32,
    newer: u32,
    published: Option<Published>,
}

#[derive(Copy, Clone, Debug)]
struct Published {
    key: PageKey,
    parent: PageKey,
}

/// Ends of a list of cached pages.
#[derive(Copy, Clone, Debug)]
struct List {
    oldest: u32,
    newest: u32,
}

/// Fixed-size pages with reference counts and a prefix index.
#[derive(Debug)]
pub(super) struct Pager {
    page_tokens: usize,
    pages: Vec<Page>,
    /// Tokens of published pages, `page_tokens` each.
    tokens: Vec<u32>,
    free: Vec<u32>,
    index: HashMap<PageKey, u32>,
    /// Cached pages by the time since when nobody uses them: those not pinned, and those pinned.
    lists: [List; 2],
    cached: u32,
    in_use: u32,
    evictions: u64,
}

impl Pager {
    pub(super) fn new(total: u32, page_tokens: u32) -> Self {
        let page = Page { refs: 0, pins: 0, older: NO_PAGE, newer: NO_PAGE, published: None };
        Self {
            page_tokens: page_tokens as usize,
            pages: vec![page; total as usize],
            tokens: vec![0; total as usize * page_tokens as usize],
            free: (0..total).rev().collect(),
            index: HashMap::new(),
            lists: [List { oldest: NO_PAGE, newest: NO_PAGE }; 2],
            cached: 0,
            in_use: 0,
            evictions: 0,
        }
    }

    /// Pages that can be allocated now.
    pub(super) fn available(&self) -> u32 {
        self.free.len() as u32 + self.cached
    }

    pub(super) fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Counts by state.
    ///
    /// # Panics
    /// If they do not add up to the pool: a page was lost.
    pub(super) fn counts(&self) -> PageCounts {
        let counts = PageCounts { free: self.free.len() as u32, cached: self.cached, in_use: self.in_use };
        assert_eq!(
            (counts.free + counts.cached + counts.in_use) as usize,
            self.pages.len(),
            "kv accounting is broken: {counts:?} of {} pages",
            self.pages.len()
        );
        counts
    }

    /// A page with one reference: a free one, or else the cached page unused for longest, pinned ones last.
    pub(super) fn alloc(&mut self) -> Option<u32> {
        let page = match self.free.pop() {
            Some(page) => page,
            None => self.evict()?,
        };
        self.pages[page as usize].refs = 1;
        self.in_use += 1;
        Some(page)
    }

    /// Adds a reference to a page that is in use or cached.
    pub(super) fn retain(&mut self, page: u32) {
        if self.pages[page as usize].refs == 0 {
            self.unlink(page);
            self.in_use += 1;
        }
        self.pages[page as usize].refs += 1;
    }

    /// Gives a reference back. The last one makes a published page cached, any other free.
    pub(super) fn release(&mut self, page: u32) {
        let entry = &mut self.pages[page as usize];
        entry.refs = entry.refs.checked_sub(1).expect("a page is released once for each reference");
        if entry.refs > 0 {
            return;
        }
        self.in_use -= 1;
        if self.pages[page as usize].published.is_some() {
            self.link(page);
        } else {
            self.free.push(page);
        }
    }

    /// Whether nobody refers to a page.
    pub(super) fn is_idle(&self, page: u32) -> bool {
        self.pages[page as usize].refs == 0
    }

    /// The page published under `key`, if it holds exactly `tokens` after `parent`.
    pub(super) fn lookup(&self, key: &PageKey, parent: &PageKey, tokens: &[u32]) -> Option<u32> {
        let page = *self.index.get(key)?;
        let published = self.pages[page as usize].published.as_ref()?;
        (published.parent == *parent && self.tokens_of(page) == tokens).then_some(page)
    }

    /// Makes a full page findable. If its content is published already, nothing changes.
    pub(super) fn publish(&mut self, page: u32, key: PageKey, parent: PageKey, tokens: &[u32]) {
        debug_assert_eq!(tokens.len(), self.page_tokens);
        if self.index.contains_key(&key) || self.pages[page as usize].published.is_some() {
            return;
        }
        let start = page as usize * self.page_tokens;
        self.tokens[start..start + self.page_tokens].copy_from_slice(tokens);
        self.pages[page as usize].published = Some(Published { key, parent });
        self.index.insert(key, page);
    }

    /// Pins a published page or takes one pin away.
    pub(super) fn pin(&mut self, page: u32, pinned: bool) {
        let idle = self.is_idle(page) && self.pages[page as usize].published.is_some();
        if idle {
            self.unlink(page);
        }
        let pins = &mut self.pages[page as usize].pins;
        *pins = if pinned { *pins + 1 } else { pins.saturating_sub(1) };
        if idle {
            self.link(page);
        }
    }

    /// Whether a page is pinned.
    pub(super) fn is_pinned(&self, page: u32) -> bool {
        self.pages[page as usize].pins > 0
    }

    /// Most leading tokens that a published page after `parent` has in common with `tokens`; `None` if there is no such page.
    pub(super) fn nearest(&self, parent: &PageKey, tokens: &[u32]) -> Option<usize> {
        let common = |page: &u32| self.tokens_of(*page).iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let siblings =
            self.index.values().filter(|page| self.pages[**page as usize].published.is_some_and(|found| found.parent == *parent));
        siblings.map(common).max()
    }

    fn tokens_of(&self, page: u32) -> &[u32] {
        let start = page as usize * self.page_tokens;
        &self.tokens[start..start + self.page_tokens]
    }

    fn evict(&mut self) -> Option<u32> {
        let page = self.lists.iter().map(|list| list.oldest).find(|page| *page != NO_PAGE)?;
        self.unlink(page);
        self.pages[page as usize].pins = 0;
        if let Some(published) = self.pages[page as usize].published.take() {
            self.index.remove(&published.key);
        }
        self.evictions += 1;
        Some(page)
    }

    /// Appends a page to the cached list as its newest.
    fn link(&mut self, page: u32) {
        let list = usize::from(self.pages[page as usize].pins > 0);
        let older = std::mem::replace(&mut self.lists[list].newest, page);
        let entry = &mut self.pages[page as usize];
        (entry.older, entry.newer) = (older, NO_PAGE);
        match older {
            NO_PAGE => self.lists[list].oldest = page,
            older => self.pages[older as usize].newer = page,
        }
        self.cached += 1;
    }

    fn unlink(&mut self, page: u32) {
        let Page { older, newer, pins, .. } = self.pages[page as usize];
        let list = &mut self.lists[usize::from(pins > 0)];
        match older {
            NO_PAGE => list.oldest = newer,
            older => self.pages[older as usize].newer = newer,
        }
        match newer {
            NO_PAGE => list.newest = older,
            newer => self.pages[newer as usize].older = older,
        }
        self.cached -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(free: u32, cached: u32, in_use: u32) -> PageCounts {
        PageCounts { free, cached, in_use }
    }

    fn publish(pager: &mut Pager, page: u32, parent: PageKey, tokens: &[u32]) -> PageKey {
        let key = page_key(&parent, tokens);
        pager.publish(page, key, parent, tokens);
        key
    }

    #[test]
    fn released_pages_are_free_unless_published() {
        let mut pager = Pager::new(4, 2);
        let (a, b) = (pager.alloc().unwrap(), pager.alloc().unwrap());
        publish(&mut pager, a, root_key(b""), &[1, 2]);
        assert_eq!(pager.counts(), counts(2, 0, 2));
        pager.release(a);
        pager.release(b);
        assert_eq!(pager.counts(), counts(3, 1, 0));
    }

    #[test]
    fn a_hit_needs_equal_tokens_parent_and_salt() {
        let mut pager = Pager::new(4, 2);
        let (root, page) = (root_key(b"salt"), pager.alloc().unwrap());
        let key = publish(&mut pager, page, root, &[1, 2]);
        assert_eq!(pager.lookup(&key, &root, &[1, 2]), Some(page));
        assert_eq!(pager.lookup(&key, &root, &[1, 3]), None, "a colliding hash with other tokens is a miss");
        assert_eq!(pager.lookup(&key, &root_key(b"other"), &[1, 2]), None);
        assert_eq!(pager.lookup(&page_key(&root_key(b"other"), &[1, 2]), &root_key(b"other"), &[1, 2]), None);
    }

    #[test]
    fn the_page_unused_for_longest_is_evicted_first() {
        let mut pager = Pager::new(3, 1);
        let root = root_key(b"");
        let pages = [1, 2, 3].map(|token| {
            let page = pager.alloc().unwrap();
            publish(&mut pager, page, root, &[token]);
            page
        });
        for page in pages {
            pager.release(page);
        }
        pager.retain(pages[0]);
        pager.release(pages[0]);
        assert_eq!(pager.alloc(), Some(pages[1]));
        assert_eq!(pager.lookup(&page_key(&root, &[2]), &root, &[2]), None, "an evicted page is not found");
        assert_eq!(pager.lookup(&page_key(&root, &[1]), &root, &[1]), Some(pages[0]));
        assert_eq!((pager.evictions(), pager.counts()), (1, counts(0, 2, 1)));
    }

    #[test]
    fn pinned_pages_are_evicted_last_and_stay_available() {
        let mut pager = Pager::new(3, 1);
        let root = root_key(b"");
        let pages = [1, 2, 3].map(|token| {
            let page = pager.alloc().unwrap();
            publish(&mut pager, page, root, &[token]);
            page
        });
        pager.pin(pages[0], true);
        pages.iter().for_each(|page| pager.release(*page));
        pager.pin(pages[1], true);
        assert_eq!(pager.available(), 3);
        assert_eq!(pager.alloc(), Some(pages[2]), "the only page that is not pinned");
        pager.pin(pages[1], false);
        assert_eq!(pager.alloc(), Some(pages[1]));
        assert_eq!(pager.alloc(), Some(pages[0]), "a pinned page goes when no other is left");
        assert!(!pager.is_pinned(pages[0]));
        assert_eq!((pager.alloc(), pager.counts()), (None, counts(0, 0, 3)));
    }

    #[test]
    fn the_nearest_page_says_where_tokens_part() {
        let mut pager = Pager::new(4, 3);
        let (root, page) = (root_key(b""), pager.alloc().unwrap());
        publish(&mut pager, page, root, &[1, 2, 3]);
        assert_eq!(pager.nearest(&root, &[1, 2, 9]), Some(2));
        assert_eq!(pager.nearest(&root, &[9, 2, 3]), Some(0));
        assert_eq!(pager.nearest(&root_key(b"other"), &[1, 2, 3]), None);
    }

    #[test]
    fn shared_pages_stay_in_use_until_the_last_reference() {
        let mut pager = Pager::new(2, 1);
        let page = pager.alloc().unwrap();
        pager.retain(page);
        pager.release(page);
        assert_eq!(pager.counts(), counts(1, 0, 1));
        pager.release(page);
        assert_eq!(pager.counts(), counts(2, 0, 0));
    }

    #[test]
    fn equal_content_is_published_once() {
        let mut pager = Pager::new(2, 1);
        let (root, a, b) = (root_key(b""), pager.alloc().unwrap(), pager.alloc().unwrap());
        let key = publish(&mut pager, a, root, &[7]);
        publish(&mut pager, b, root, &[7]);
        assert_eq!(pager.lookup(&key, &root, &[7]), Some(a));
        pager.release(b);
        assert_eq!(pager.counts(), counts(1, 0, 1));
    }

    #[test]
    fn an_exhausted_pool_gives_nothing() {
        let mut pager = Pager::new(1, 1);
        assert_eq!(pager.alloc(), Some(0));
        assert_eq!((pager.alloc(), pager.available()), (None, 0));
    }
}
