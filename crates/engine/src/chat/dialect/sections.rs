//! Calls in a section: a name, a separator, and arguments in JSON.

use super::input::{Begins, Input, MOST_NAME, MOST_SPACE, begins, is_space, trim, trim_start};
use super::json::{Arguments, Ended};
use super::{Piece, Progress};

/// How a model writes them.
#[derive(Debug)]
pub(super) struct Tags {
    /// The dialect's name in messages.
    pub(super) name: &'static str,
    /// The tags around all calls, if there are any.
    pub(super) section: Option<[&'static str; 2]>,
    /// The tag before a call.
    pub(super) call: &'static str,
    /// The tag after a call, if there is one.
    pub(super) call_end: Option<&'static str>,
    /// The tag between name and arguments.
    pub(super) separator: &'static str,
    pub(super) naming: Naming,
    /// The tags that start calls: the one around all calls, if there is one, and the one before a call.
    pub(super) begins: &'static [&'static str],
    /// Tags outside calls that are not text.
    pub(super) silent: &'static [&'static str],
}

/// Where the name is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    /// Before the separator. If no JSON follows the separator, the name is after it, and the JSON in a code block.
    BeforeOrAfter,
    /// Before the separator, as `functions.NAME:NUMBER`.
    Numbered,
    /// Before the separator: `NAME`, or `NAME`, this tag and an id.
    BeforeId(&'static str),
    /// Before the separator: an id, this tag and the name.
    AfterId(&'static str),
}

impl Naming {
    /// The tag between the name and the id.
    pub(super) fn tag(self) -> Option<&'static str> {
        match self {
            Naming::BeforeId(tag) | Naming::AfterId(tag) => Some(tag),
            Naming::BeforeOrAfter | Naming::Numbered => None,
        }
    }
}

/// DeepSeek V3, R1 and V3.1.
pub(super) static DEEPSEEK: Tags = Tags {
    name: "deepseek",
    section: Some(["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]),
    call: "<｜tool▁call▁begin｜>",
    call_end: Some("<｜tool▁call▁end｜>"),
    separator: "<｜tool▁sep｜>",
    naming: Naming::BeforeOrAfter,
    begins: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    silent: &[],
};

/// Kimi K2.
pub(super) static KIMI: Tags = Tags {
    name: "kimi",
    section: Some(["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"]),
    call: "<|tool_call_begin|>",
    call_end: Some("<|tool_call_end|>"),
    separator: "<|tool_call_argument_begin|>",
    naming: Naming::Numbered,
    begins: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    silent: &[],
};

/// Mistral since 2025.
pub(super) static MISTRAL: Tags = Tags {
    name: "mistral",
    section: None,
    call: "[TOOL_CALLS]",
    call_end: None,
    separator: "[ARGS]",
    naming: Naming::BeforeId("[CALL_ID]"),
    begins: &["[TOOL_CALLS]"],
    silent: &[],
};

/// The start of a Solar Open message, before its role.
pub(super) const SOLAR_BEGIN: &str = "<|begin|>";

/// Solar Open, in which reasoning, answers and calls are messages.
pub(super) static SOLAR: Tags = Tags {
    name: "solar-open",
    section: Some(["<|tool_calls|>", "<|calls|>"]),
    call: "<|tool_call:begin|>",
    call_end: Some("<|tool_call:end|>"),
    separator: "<|tool_call:args|>",
    naming: Naming::AfterId("<|tool_call:name|>"),
    begins: &["<|tool_calls|>", "<|tool_call:begin|>"],
    silent: &["<|begin|>assistant", "<|content|>", "<|end|>", "<|calls|>"],
};

/// The calls of a section.
#[derive(Clone, Debug)]
pub(super) struct Calls {
    tags: &'static Tags,
    state: SectionState,
    /// Whether there was a call.
    certain: bool,
    /// The number of bytes before the name.
    lead: usize,
}

#[derive(Clone, Debug)]
enum SectionState {
    /// Before a call, or after the last one.
    Between,
    /// Before the separator.
    Head,
    Arguments(Arguments),
}

impl Calls {
    /// After a tag that opens the section or a call.
    pub(super) fn new(tags: &'static Tags, opened: &str) -> Calls {
        let state = if opened == tags.call { SectionState::Head } else { SectionState::Between };
        Calls { tags, state, certain: false, lead: 0 }
    }

    pub(super) fn step(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> Progress {
        let tags = self.tags;
        loop {
            match &mut self.state {
                SectionState::Between => {
                    let rest = input.rest();
                    let inner = trim_start(rest);
                    let space = rest.len() - inner.len();
                    let known: Vec<&str> =
                        [tags.call].into_iter().chain(tags.section.map(|[_, end]| end)).collect();
                    match begins(inner, &known, input.ended()) {
                        Begins::With(0) => {
                            self.lead = space + tags.call.len();
                            self.state = SectionState::Head;
                        }
                        Begins::With(which) => {
                            input.advance(space + known[which].len());
                            return Progress::Done;
                        }
                        Begins::Maybe if space <= MOST_SPACE => return Progress::Wait,
                        Begins::Maybe | Begins::Without => return self.cut(),
                    }
                }
                SectionState::Head => match head(tags, &input.rest()[self.lead..], input.ended()) {
                    Head::Wait => return Progress::Wait,
                    Head::Nameless => return self.cut(),
                    Head::Name { name, skip } => {
                        emit(Piece::Call { name });
                        input.advance(self.lead + skip);
                        self.certain = true;
                        self.state = SectionState::Arguments(Arguments::Start);
                    }
                },
                SectionState::Arguments(arguments) => {
                    let section_end = tags.section.map(|[_, end]| end);
                    let ends: Vec<&str> =
                        tags.call_end.into_iter().chain(section_end).chain([tags.call]).collect();
                    match arguments.step(input, &ends, tags.call_end.is_some(), emit) {
                        None => return Progress::Wait,
                        Some(ended) => {
                            if let (Ended::ByTag(0), Some(end)) = (ended, tags.call_end) {
                                input.advance(end.len());
                            }
                            self.state = SectionState::Between;
                        }
                    }
                }
            }
        }
    }

    /// Ends calls that the end of the text cuts off.
    pub(super) fn cut(&self) -> Progress {
        if self.certain { Progress::Done } else { Progress::NotACall }
    }
}

/// The start of a call.
enum Head<'a> {
    Wait,
    Nameless,
    /// The name, and the number of bytes before the arguments.
    Name {
        name: &'a str,
        skip: usize,
    },
}

fn head<'a>(tags: &Tags, text: &'a str, ended: bool) -> Head<'a> {
    let known: Vec<&str> = [tags.separator].into_iter().chain(tags.naming.tag()).collect();
    let is_first = |c| known.iter().any(|tag| tag.starts_with(c));
    // The place of the tag between name and id.
    let mut id = None;
    let mut from = 0;
    let at = loop {
        let Some(at) = text[from..].find(is_first).map(|at| from + at) else {
            return if ended || text.len() > MOST_NAME { Head::Nameless } else { Head::Wait };
        };
        match begins(&text[at..], &known, ended) {
            Begins::With(0) => break at,
            Begins::With(which) if id.is_none() => {
                id = Some(at);
                from = at + known[which].len();
            }
            Begins::Maybe => return Head::Wait,
            Begins::With(_) | Begins::Without => return Head::Nameless,
        }
    };
    let name = trim(&text[..at]);
    let skip = at + tags.separator.len();
    if name.len() > MOST_NAME {
        return Head::Nameless;
    }
    match tags.naming {
        Naming::BeforeId(_) | Naming::AfterId(_) => {
            let name = match (tags.naming, id) {
                (Naming::BeforeId(_), Some(id)) => &text[..id],
                (Naming::AfterId(tag), Some(id)) => &text[id + tag.len()..at],
                (_, None) | (Naming::BeforeOrAfter | Naming::Numbered, _) => name,
            };
            let name = trim(name);
            if name.is_empty() { Head::Nameless } else { Head::Name { name, skip } }
        }
        Naming::Numbered => {
            let name = name.strip_prefix("functions.").unwrap_or(name);
            let name = match name.rsplit_once(':') {
                Some((name, number)) if number.bytes().all(|b| b.is_ascii_digit()) => name,
                _ => name,
            };
            if name.is_empty() { Head::Nameless } else { Head::Name { name, skip } }
        }
        Naming::BeforeOrAfter => {
            let after = &text[skip..];
            let space = after.bytes().take_while(|&b| is_space(b)).count();
            match after.as_bytes().get(space) {
                None if ended && name.is_empty() => Head::Nameless,
                None if !ended && space <= MOST_NAME => Head::Wait,
                None | Some(b'{') if !name.is_empty() => Head::Name { name, skip },
                Some(b'<') if !name.is_empty() => Head::Name { name, skip },
                _ => fenced(after, skip, ended),
            }
        }
    }
}

/// The name before a code block.
fn fenced(text: &str, skip: usize, ended: bool) -> Head<'_> {
    let Some(end) = text.find(['`', '{', '<']) else {
        return if ended || text.len() > MOST_NAME { Head::Nameless } else { Head::Wait };
    };
    let name = trim(&text[..end]);
    if name.is_empty() || name.len() > MOST_NAME || name.contains('\n') {
        return Head::Nameless;
    }
    let block = &text[end..];
    let fence = block.bytes().take_while(|&b| b == b'`').count();
    let language = if fence == 0 {
        0
    } else {
        match block[fence..].find(|c: char| !c.is_ascii_alphabetic()) {
            Some(count) => count,
            None if ended => block.len() - fence,
            None if block.len() > MOST_NAME => return Head::Nameless,
            None => return Head::Wait,
        }
    };
    Head::Name { name, skip: skip + end + fence + language }
}
