//! The tokens as a tree of their bytes, for walks that need one child at a time.

/// What is no token.
const NONE: u32 = u32::MAX;

/// The tree. Nodes are numbered level by level, so that the children of one follow one another.
pub(super) struct Tree {
    /// The byte that leads to each node.
    bytes: Vec<u8>,
    /// The token that ends at each node.
    ids: Vec<u32>,
    /// The first child of each node; the next node's is its end.
    first: Vec<u32>,
}

impl Tree {
    /// Of tokens with their ids; the least id of equal ones counts.
    pub(super) fn new(mut words: Vec<(&[u8], u32)>) -> Self {
        words.sort_unstable();
        let mut tree = Self { bytes: vec![0], ids: Vec::new(), first: Vec::new() };
        // Words of each node, all of which begin with its bytes.
        let (mut level, mut depth) = (vec![&words[..]], 0);
        while !level.is_empty() {
            let mut below = Vec::new();
            for words in level {
                let ends = words.iter().take_while(|(word, _)| word.len() == depth).count();
                tree.ids.push(words.first().filter(|_| ends > 0).map_or(NONE, |(_, id)| *id));
                tree.first.push(tree.bytes.len() as u32);
                let longer = words.get(ends..).unwrap_or_default();
                for group in longer.chunk_by(|(one, _), (other, _)| one.get(depth) == other.get(depth)) {
                    tree.bytes.extend(group.first().and_then(|(word, _)| word.get(depth)));
                    below.push(group);
                }
            }
            (level, depth) = (below, depth + 1);
        }
        tree.first.push(tree.bytes.len() as u32);
        tree
    }

    /// Where no byte was read.
    pub(super) const ROOT: u32 = 0;

    /// The node behind another one and a byte.
    pub(super) fn child(&self, node: u32, byte: u8) -> Option<u32> {
        let (from, to) = (*self.first.get(node as usize)?, *self.first.get(node as usize + 1)?);
        let children = self.bytes.get(from as usize..to as usize)?;
        children.binary_search(&byte).ok().map(|index| from + index as u32)
    }

    /// The token that ends at a node.
    pub(super) fn id(&self, node: u32) -> Option<u32> {
        self.ids.get(node as usize).copied().filter(|id| *id != NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_token_is_found_where_its_bytes_lead() {
        let words = [&b"ab"[..], b"a", b"abc", b"b", b"xyz", b"ab", b"\xFE"];
        let tree = Tree::new(words.iter().zip(0..).map(|(word, id)| (*word, id)).collect());
        let find = |word: &[u8]| word.iter().try_fold(Tree::ROOT, |node, byte| tree.child(node, *byte)).and_then(|node| tree.id(node));
        let found: Vec<Option<u32>> = words.iter().map(|word| find(word)).collect();
        assert_eq!(found, [Some(0), Some(1), Some(2), Some(3), Some(4), Some(0), Some(6)]);
        assert_eq!([find(b""), find(b"x"), find(b"abd"), find(b"c")], [None; 4]);
        assert_eq!(Tree::new(Vec::new()).child(Tree::ROOT, b'a'), None);
    }
}
