//! The buffer of a parser: text that has arrived and is not parsed yet.

/// The longest white space, in bytes, that waits for what follows it. The start of longer white space is text.
pub(super) const MOST_SPACE: usize = 1024;

/// The longest name of a function or a parameter, in bytes.
pub(super) const MOST_NAME: usize = 256;

/// Whether a byte is white space between tags.
pub(super) fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\n' | b'\r' | b'\t')
}

/// The text without leading white space.
pub(super) fn trim_start(text: &str) -> &str {
    text.trim_start_matches([' ', '\n', '\r', '\t'])
}

/// The text without leading and trailing white space.
pub(super) fn trim(text: &str) -> &str {
    text.trim_matches([' ', '\n', '\r', '\t'])
}

/// The result of [`Input::find`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The tag with this index starts at `at`.
    Tag { at: usize, which: usize },
    /// No tag; none starts before `sure`.
    Nothing { sure: usize },
}

/// How a text starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begins {
    /// With the tag of this index.
    With(usize),
    /// With the start of a tag, perhaps.
    Maybe,
    /// Without a tag.
    Without,
}

/// Text that has arrived and is not parsed yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Input {
    text: String,
    /// The start of the unread text.
    at: usize,
    /// How far the unread text has been searched, counted from `at`.
    searched: usize,
    /// Whether all text has arrived.
    ended: bool,
}

impl Input {
    pub(super) fn push(&mut self, text: &str) {
        self.text.drain(..self.at);
        self.at = 0;
        self.text.push_str(text);
    }

    pub(super) fn end(&mut self) {
        self.ended = true;
    }

    pub(super) fn ended(&self) -> bool {
        self.ended
    }

    /// The unread text.
    pub(super) fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    /// Consumes `count` bytes. The rest is searched again from its start.
    pub(super) fn advance(&mut self, count: usize) {
        self.at += count;
        self.searched = 0;
    }

    /// Consumes white space.
    pub(super) fn skip_space(&mut self) {
        let rest = self.rest();
        let count = rest.len() - trim_start(rest).len();
        if count > 0 {
            self.advance(count);
        }
    }

    /// Finds the first of these tags. Until something is consumed, the tags must stay the same, because no place is
    /// searched twice.
    pub(super) fn find(&mut self, tags: &[&str]) -> Found {
        self.find_near(tags, usize::MAX)
    }

    /// Finds the first of these tags if it starts within `most` bytes.
    pub(super) fn find_near(&mut self, tags: &[&str], most: usize) -> Found {
        let mut firsts: Vec<char> = tags.iter().filter_map(|tag| tag.chars().next()).collect();
        firsts.dedup();
        let mut from = self.searched;
        while let Some(at) = self.rest()[from..].find(&firsts[..]) {
            let at = from + at;
            if at > most {
                self.searched = at;
                return Found::Nothing { sure: at };
            }
            let here = &self.rest()[at..];
            if let Some(which) = tags.iter().position(|tag| here.starts_with(tag)) {
                return Found::Tag { at, which };
            }
            if !self.ended && tags.iter().any(|tag| tag.starts_with(here)) {
                self.searched = at;
                return Found::Nothing { sure: at };
            }
            from = at + here.chars().next().map_or(1, char::len_utf8);
        }
        self.searched = self.rest().len();
        Found::Nothing { sure: self.searched }
    }

    /// Which of these tags the unread text starts with.
    pub(super) fn begins(&self, tags: &[&str]) -> Begins {
        begins(self.rest(), tags, self.ended)
    }
}

/// Which of these tags a text starts with. More text may arrive unless it has `ended`.
pub(super) fn begins(text: &str, tags: &[&str], ended: bool) -> Begins {
    if let Some(which) = tags.iter().position(|tag| text.starts_with(tag)) {
        Begins::With(which)
    } else if !ended && tags.iter().any(|tag| tag.starts_with(text)) {
        Begins::Maybe
    } else {
        Begins::Without
    }
}

/// The end of the text without trailing white space, which may turn out not to belong to it.
pub(super) fn without_space_at_end(text: &str) -> usize {
    let space = text.bytes().rev().take(MOST_SPACE).take_while(|&byte| is_space(byte)).count();
    text.len() - space
}
