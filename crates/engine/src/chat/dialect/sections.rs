//! Calls in a section of their own: a name, a separator, and arguments in JSON.

use super::input::{Begins, Input, MOST_NAME, MOST_SPACE, begins, is_space, trim, trim_start};
use super::json::Arguments;
use super::{Piece, Progress};

/// How a model writes them.
#[derive(Debug)]
pub(super) struct Tags {
    /// The dialect's name, for people.
    pub(super) name: &'static str,
    /// Around all calls.
    pub(super) section: &'static str,
    pub(super) section_end: &'static str,
    /// Around a call.
    pub(super) call: &'static str,
    pub(super) call_end: &'static str,
    /// Between its name and its arguments.
    pub(super) separator: &'static str,
    pub(super) naming: Naming,
    /// What calls begin with: the tag around them or, second, that of a call itself.
    pub(super) begins: &'static [&'static str],
}

/// Where the name is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    /// Before the separator. If no JSON follows it, then after it, and the JSON in a block of code.
    BeforeOrAfter,
    /// Before it, as `functions.NAME:NUMBER`.
    Numbered,
}

/// DeepSeek V3, R1 and V3.1.
pub(super) static DEEPSEEK: Tags = Tags {
    name: "deepseek",
    section: "<｜tool▁calls▁begin｜>",
    section_end: "<｜tool▁calls▁end｜>",
    call: "<｜tool▁call▁begin｜>",
    call_end: "<｜tool▁call▁end｜>",
    separator: "<｜tool▁sep｜>",
    naming: Naming::BeforeOrAfter,
    begins: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
};

/// Kimi K2.
pub(super) static KIMI: Tags = Tags {
    name: "kimi",
    section: "<|tool_calls_section_begin|>",
    section_end: "<|tool_calls_section_end|>",
    call: "<|tool_call_begin|>",
    call_end: "<|tool_call_end|>",
    separator: "<|tool_call_argument_begin|>",
    naming: Naming::Numbered,
    begins: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
};

/// The calls of a section.
#[derive(Clone, Debug)]
pub(super) struct Calls {
    tags: &'static Tags,
    state: State,
    /// Whether there was a call.
    certain: bool,
    /// How many bytes are before the name.
    lead: usize,
}

#[derive(Clone, Debug)]
enum State {
    /// Before a call, or after the last.
    Between,
    /// Before the separator.
    Head,
    Arguments(Arguments),
}

impl Calls {
    /// After the tag that opens the section; or, if `inside`, the call.
    pub(super) fn new(tags: &'static Tags, inside: bool) -> Calls {
        let state = if inside { State::Head } else { State::Between };
        Calls { tags, state, certain: false, lead: 0 }
    }

    pub(super) fn step(&mut self, input: &mut Input, emit: &mut dyn FnMut(Piece<'_>)) -> Progress {
        let tags = self.tags;
        loop {
            match &mut self.state {
                State::Between => {
                    let rest = input.rest();
                    let inner = trim_start(rest);
                    let space = rest.len() - inner.len();
                    match begins(inner, &[tags.call, tags.section_end], input.ended()) {
                        Begins::With(0) => {
                            self.lead = space + tags.call.len();
                            self.state = State::Head;
                        }
                        Begins::With(_) => {
                            input.advance(space + tags.section_end.len());
                            return Progress::Done;
                        }
                        Begins::Maybe if space <= MOST_SPACE => return Progress::Wait,
                        Begins::Maybe | Begins::Without => return self.cut(),
                    }
                }
                State::Head => match head(tags, &input.rest()[self.lead..], input.ended()) {
                    Head::Wait => return Progress::Wait,
                    Head::Nameless => return self.cut(),
                    Head::Name { name, skip } => {
                        emit(Piece::Call { name });
                        input.advance(self.lead + skip);
                        self.certain = true;
                        self.state = State::Arguments(Arguments::Start);
                    }
                },
                State::Arguments(arguments) => {
                    let ends = [tags.call_end, tags.section_end, tags.call];
                    match arguments.step(input, &ends, emit) {
                        None => return Progress::Wait,
                        Some(which) => {
                            if which == 0 {
                                input.advance(tags.call_end.len());
                            }
                            self.state = State::Between;
                        }
                    }
                }
            }
        }
    }

    /// What calls that are not there, or not all of them, have come to.
    pub(super) fn cut(&self) -> Progress {
        if self.certain { Progress::Done } else { Progress::NotACall }
    }
}

/// The head of a call.
enum Head<'a> {
    Wait,
    Nameless,
    /// The name, and how many bytes are before the arguments.
    Name {
        name: &'a str,
        skip: usize,
    },
}

fn head<'a>(tags: &Tags, text: &'a str, ended: bool) -> Head<'a> {
    let Some(at) = text.find('<') else {
        return if ended || text.len() > MOST_NAME { Head::Nameless } else { Head::Wait };
    };
    let after = &text[at..];
    if !after.starts_with(tags.separator) {
        let may_be = !ended && tags.separator.starts_with(after);
        return if may_be { Head::Wait } else { Head::Nameless };
    }
    let name = trim(&text[..at]);
    let skip = at + tags.separator.len();
    if name.len() > MOST_NAME {
        return Head::Nameless;
    }
    match tags.naming {
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

/// The name before a block of code.
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
