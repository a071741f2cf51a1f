//! Questions about the prefix cache, and pins. Answered by the engine thread between two steps.
//!
//! Page keys are hashed by whoever asks, so that a long prompt costs the engine thread look-ups alone.
//! A pin makes a page the last to be evicted; it takes nothing away from admission, so pins can
//! neither starve a request nor block one.

use super::core::Core;
use super::handle::EngineHandle;
use super::pager::PageKey;
use super::sequence::PageKeys;

/// What the prefix cache holds of a prompt.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct PrefixProbe {
    /// Leading tokens found; a whole number of pages.
    pub cached_tokens: u32,
    /// Tokens that could be found at most: whole pages that leave one token to compute.
    pub cacheable_tokens: u32,
    /// Of the tokens found, those in pinned pages.
    pub pinned_tokens: u32,
    /// Why not more was found.
    pub miss: Option<Miss>,
    /// Pages that the next request may take: free or cached, and reserved for nobody.
    pub pages_available: u32,
}

/// Why a prompt, or the rest of it, is not in the prefix cache.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Miss {
    /// The cache is switched off.
    Disabled,
    /// The prompt is shorter than a page and one token.
    TooShort,
    /// Another prompt is cached that goes the same way up to this token.
    Differs {
        /// Index of the first token that differs.
        token: u32,
    },
    /// Nothing is cached after the tokens found: never computed with this salt, or evicted since.
    Absent,
}

/// A page of a prompt: its key, its parent's, its tokens.
type Page = (PageKey, PageKey, Vec<u32>);

/// Full pages of a prompt that a later request could find.
fn pages_of(prompt: &[u32], salt: &[u8], page_tokens: usize) -> Vec<Page> {
    let mut keys = PageKeys::new(salt);
    let full = prompt.len().saturating_sub(1) / page_tokens.max(1);
    let page = |index: usize| {
        let (key, parent) = keys.of(index, prompt, page_tokens);
        let tokens = prompt.iter().skip(index * page_tokens).take(page_tokens).copied().collect();
        (key, parent, tokens)
    };
    (0..full).map(page).collect()
}

impl EngineHandle {
    /// Asks what the prefix cache holds of `prompt`; `reply` is called on the engine thread, or dropped if that ended.
    pub fn probe_prefix(&self, prompt: &[u32], salt: &[u8], reply: impl FnOnce(PrefixProbe) + Send + 'static) {
        let shares = self.shares_prefixes();
        let pages = if shares { pages_of(prompt, salt, self.limits().page_tokens as usize) } else { Vec::new() };
        let none = if shares { Miss::TooShort } else { Miss::Disabled };
        self.errand(move |core| reply(core.probe(&pages, none)));
    }

    /// Pins what the prefix cache holds of `prompt`, or takes the pin away again; `reply` gets the tokens of those pages.
    ///
    /// Pins are counted: each is taken away once. A page that was evicted has none left.
    pub fn pin_prefix(&self, prompt: &[u32], salt: &[u8], pinned: bool, reply: impl FnOnce(u32) + Send + 'static) {
        let pages = pages_of(prompt, salt, self.limits().page_tokens as usize);
        self.errand(move |core| reply(core.pin(&pages, pinned)));
    }
}

impl Core {
    /// `none` is the reason if there is no page to look for.
    fn probe(&self, pages: &[Page], none: Miss) -> PrefixProbe {
        let found: Vec<u32> = self.find(pages);
        let page_tokens = self.page_tokens;
        let pinned = found.iter().filter(|page| self.pager.is_pinned(**page)).count() as u32;
        let miss = pages.get(found.len()).map(|(_, parent, tokens)| match self.pager.nearest(parent, tokens) {
            Some(common) => Miss::Differs { token: found.len() as u32 * page_tokens + common as u32 },
            None => Miss::Absent,
        });
        PrefixProbe {
            cached_tokens: found.len() as u32 * page_tokens,
            cacheable_tokens: pages.len() as u32 * page_tokens,
            pinned_tokens: pinned * page_tokens,
            miss: if pages.is_empty() { Some(none) } else { miss },
            pages_available: self.pager.available().saturating_sub(self.reserved),
        }
    }

    fn pin(&mut self, pages: &[Page], pinned: bool) -> u32 {
        let found = self.find(pages);
        for page in &found {
            self.pager.pin(*page, pinned);
        }
        found.len() as u32 * self.page_tokens
    }

    /// Leading pages that are published.
    fn find(&self, pages: &[Page]) -> Vec<u32> {
        pages.iter().map_while(|(key, parent, tokens)| self.pager.lookup(key, parent, tokens)).collect()
    }
}
