//! Routing traces: which experts each token of a conversation chose, for simulations.
//!
//! A file contains, in little-endian order: the magic number, a version, the number of layers and for each its
//! [`RoutedLayer`]; then batches, each with a tag for its phase, the number of tokens, and for each
//! layer with experts the choices `[tokens, used]` in rank order, as one byte each if a layer has at most 256 experts
//! and as two otherwise; then an end tag and a checksum of everything before it.

use std::fs;
use std::path::Path;

use crate::LayerIdx;
use crate::backend::Routing;
use crate::error::{Error, Result};
use crate::experts::ExpertLayer;
use crate::hash::Fnv;

/// The numbers of a layer's routed experts; all zero if it has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoutedLayer {
    /// The number of experts.
    pub experts: usize,
    /// Experts used per token.
    pub used: usize,
    /// Bytes of one expert.
    pub expert_bytes: u64,
}

impl RoutedLayer {
    /// The numbers of a layer.
    pub fn of(layer: &Option<ExpertLayer>) -> RoutedLayer {
        layer.as_ref().map_or_else(RoutedLayer::default, |layer| RoutedLayer {
            experts: layer.experts.len(),
            used: layer.used,
            expert_bytes: layer.expert_bytes(),
        })
    }
}

/// Why tokens are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// A chunk of a prompt.
    Prompt,
    /// A token of the answer.
    Answer,
}

/// The routing of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    layers: Vec<RoutedLayer>,
    batches: Vec<Batch>,
    /// The choices of all complete batches, then of the current batch's layers so far.
    choices: Vec<u16>,
    /// Where the current batch starts.
    complete: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Batch {
    phase: Phase,
    tokens: usize,
}

impl Trace {
    /// An empty trace of a model with these layers.
    ///
    /// # Errors
    /// If there are no experts, a layer uses more experts than it has, or a number is too large for a trace.
    pub fn new(layers: Vec<RoutedLayer>) -> Result<Trace> {
        let invalid = |message: String| Err(Error::Invalid(message));
        if layers.len() > MAX_LAYERS {
            return invalid(format!("a trace has at most {MAX_LAYERS} layers, not {}", layers.len()));
        }
        for (i, &RoutedLayer { experts, used, .. }) in layers.iter().enumerate() {
            if experts > MAX_EXPERTS {
                return invalid(format!(
                    "layer {i} has {experts} experts; a trace holds at most {MAX_EXPERTS}"
                ));
            }
            if used > experts || (used == 0) != (experts == 0) {
                return invalid(format!("layer {i} uses {used} of {experts} experts, which makes no sense"));
            }
        }
        match layers.iter().map(|l| l.experts).sum::<usize>() {
            0 => invalid("the model has no routed experts, so there is nothing to trace".into()),
            all if all > MAX_ALL_EXPERTS => {
                invalid(format!("a trace holds at most {MAX_ALL_EXPERTS} experts, not {all}"))
            }
            _ => Ok(Trace { layers, batches: Vec::new(), choices: Vec::new(), complete: 0 }),
        }
    }

    /// The layers of the model.
    pub fn layers(&self) -> &[RoutedLayer] {
        &self.layers
    }

    /// The number of tokens of a phase.
    pub fn tokens(&self, phase: Phase) -> usize {
        self.batches.iter().filter(|b| b.phase == phase).map(|b| b.tokens).sum()
    }

    /// Adds the choices of a layer. A batch counts once its last layer has been added. A batch that ended early is
    /// dropped when the next one starts.
    ///
    /// # Panics
    /// If the trace has no such layer with experts, or the routing does not fit it.
    pub fn record(&mut self, phase: Phase, layer: LayerIdx, routing: &Routing) {
        let used = self.layers[layer.0].used;
        assert!(used > 0 && routing.top_k() == used, "the routing is not layer {}'s", layer.0);
        let routed = |layer: &RoutedLayer| layer.used > 0;
        if self.layers.iter().position(routed) == Some(layer.0) {
            self.choices.truncate(self.complete);
        }
        self.choices.extend(routing.experts().iter().map(|&expert| expert as u16));
        if self.layers.iter().rposition(routed) == Some(layer.0) {
            self.batches.push(Batch { phase, tokens: routing.experts().len() / used });
            self.complete = self.choices.len();
        }
    }

    /// Calls `visit` for each layer with experts of each batch, in order.
    pub fn visit(&self, mut visit: impl FnMut(Choices<'_>)) {
        let mut rest = &self.choices[..self.complete];
        for (batch, &Batch { phase, tokens }) in self.batches.iter().enumerate() {
            let mut first = 0;
            for layer in self.layers.iter().filter(|l| l.used > 0) {
                let experts;
                (experts, rest) = rest.split_at(tokens * layer.used);
                visit(Choices { batch, phase, first, experts });
                first += layer.experts;
            }
        }
    }

    /// The bytes of a trace file.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend((self.layers.len() as u32).to_le_bytes());
        for layer in &self.layers {
            out.extend((layer.experts as u32).to_le_bytes());
            out.extend((layer.used as u32).to_le_bytes());
            out.extend(layer.expert_bytes.to_le_bytes());
        }
        let mut rest = &self.choices[..self.complete];
        for batch in &self.batches {
            out.push(match batch.phase {
                Phase::Prompt => PROMPT,
                Phase::Answer => ANSWER,
            });
            out.extend((batch.tokens as u32).to_le_bytes());
            for layer in &self.layers {
                let experts;
                (experts, rest) = rest.split_at(batch.tokens * layer.used);
                match layer.is_narrow() {
                    true => out.extend(experts.iter().map(|&e| e as u8)),
                    false => out.extend(experts.iter().flat_map(|e| e.to_le_bytes())),
                }
            }
        }
        out.push(END);
        out.extend(checksum(&out).to_le_bytes());
        out
    }

    /// Reads a trace file.
    ///
    /// # Errors
    /// If the file cannot be read or is damaged.
    pub fn read(path: &Path) -> Result<Trace> {
        let bytes = fs::read(path).map_err(|e| Error::io(path, "cannot read", e))?;
        Trace::decode(&bytes).map_err(|message| Error::format(path, message))
    }

    /// Parses a trace, or says what is wrong with the bytes.
    fn decode(bytes: &[u8]) -> Result<Trace, String> {
        let mut from = Reader { bytes, offset: 0 };
        if from.take(MAGIC.len()).ok() != Some(MAGIC) {
            return Err("is not a routing trace; `forebay trace` makes one".into());
        }
        let version = from.u32()?;
        if version != VERSION {
            return Err(format!("is a routing trace of version {version}; only {VERSION} can be read"));
        }
        let body = bytes.len().checked_sub(8).ok_or("is cut short")?;
        let damaged = || "is damaged: its checksum does not match; record it again".to_owned();
        if bytes[body..] != checksum(&bytes[..body]).to_le_bytes() {
            return Err(damaged());
        }
        let layers = from.u32()? as usize;
        if layers > MAX_LAYERS {
            return Err(format!("claims to have {layers} layers"));
        }
        let layers = (0..layers)
            .map(|_| {
                Ok(RoutedLayer {
                    experts: from.u32()? as usize,
                    used: from.u32()? as usize,
                    expert_bytes: from.u64()?,
                })
            })
            .collect::<Result<_, String>>()?;
        let mut trace = Trace::new(layers).map_err(|error| error.to_string())?;
        loop {
            let at = from.offset;
            let phase = match from.u8()? {
                PROMPT => Phase::Prompt,
                ANSWER => Phase::Answer,
                END if from.offset == body => return Ok(trace),
                tag => return Err(format!("has an unknown tag {tag} at offset {at}")),
            };
            let tokens = from.u32()? as usize;
            if tokens == 0 {
                return Err(format!("has a batch without tokens at offset {at}"));
            }
            trace.read_batch(Batch { phase, tokens }, &mut from)?;
        }
    }

    fn read_batch(&mut self, batch: Batch, from: &mut Reader<'_>) -> Result<(), String> {
        for (i, layer) in self.layers.iter().enumerate() {
            let at = from.offset;
            let width = if layer.is_narrow() { 1 } else { 2 };
            // Counts of 32 bits each: their product fits 64, and more than the file has is refused there.
            let len = batch.tokens as u64 * (layer.used * width) as u64;
            let bytes = from.take(usize::try_from(len).unwrap_or(usize::MAX))?;
            let start = self.choices.len();
            match width {
                1 => self.choices.extend(bytes.iter().map(|&b| u16::from(b))),
                _ => self.choices.extend(bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]))),
            }
            let chosen = &self.choices[start..];
            if let Some(expert) = chosen.iter().find(|&&e| usize::from(e) >= layer.experts) {
                let experts = layer.experts;
                return Err(format!("names expert {expert} of {experts} in layer {i}, near offset {at}"));
            }
        }
        self.batches.push(batch);
        self.complete = self.choices.len();
        Ok(())
    }
}

/// The choices of one layer for the tokens of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Choices<'a> {
    /// The number of the batch.
    pub batch: usize,
    /// The phase of its tokens.
    pub phase: Phase,
    /// The index of the layer's first expert among all experts of the model.
    pub first: usize,
    /// `[tokens, used]` Experts of the layer, in rank order.
    pub experts: &'a [u16],
}

const MAGIC: &[u8] = b"FOREBAYROUTING\r\n";
const VERSION: u32 = 1;
const PROMPT: u8 = 0;
const ANSWER: u8 = 1;
const END: u8 = 2;

/// Far more than models have. These limits bound the memory that a hostile header can make us allocate.
const MAX_LAYERS: usize = 1 << 12;
const MAX_EXPERTS: usize = 1 << 16;
const MAX_ALL_EXPERTS: usize = 1 << 20;

impl RoutedLayer {
    /// Whether an expert's number fits one byte.
    fn is_narrow(&self) -> bool {
        self.experts <= 256
    }
}

/// FNV-1a, which detects accidental damage. No more is needed.
fn checksum(bytes: &[u8]) -> u64 {
    Fnv::of(bytes)
}

/// A position in a file.
struct Reader<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let rest = &self.bytes[self.offset..];
        let taken = rest.get(..len).ok_or_else(|| {
            format!("ends early: {len} bytes are wanted at offset {}, {} are left", self.offset, rest.len())
        })?;
        self.offset += len;
        Ok(taken)
    }

    fn u8(&mut self) -> Result<u8, String> {
        self.take(1).map(|b| b[0])
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.take(4).map(|b| b.iter().rev().fold(0, |n, &byte| n << 8 | u32::from(byte)))
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.take(8).map(|b| b.iter().rev().fold(0, |n, &byte| n << 8 | u64::from(byte)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A dense layer, a narrow one and a wide one.
    fn layers() -> Vec<RoutedLayer> {
        vec![
            RoutedLayer::default(),
            RoutedLayer { experts: 8, used: 2, expert_bytes: 100 },
            RoutedLayer { experts: 300, used: 3, expert_bytes: 200 },
        ]
    }

    fn routing(top_k: usize, experts: &[u32]) -> Routing {
        let mut routing = Routing::default();
        routing.prepare(experts.len() / top_k, top_k).0.copy_from_slice(experts);
        routing
    }

    fn example() -> Trace {
        let mut trace = Trace::new(layers()).unwrap();
        trace.record(Phase::Prompt, LayerIdx(1), &routing(2, &[7, 0, 1, 2]));
        trace.record(Phase::Prompt, LayerIdx(2), &routing(3, &[299, 0, 256, 5, 6, 7]));
        // This batch is cancelled after its first layer.
        trace.record(Phase::Prompt, LayerIdx(1), &routing(2, &[3, 4]));
        trace.record(Phase::Answer, LayerIdx(1), &routing(2, &[5, 6]));
        trace.record(Phase::Answer, LayerIdx(2), &routing(3, &[1, 2, 3]));
        trace
    }

    fn visited(trace: &Trace) -> Vec<(usize, Phase, usize, Vec<u16>)> {
        let mut all = Vec::new();
        trace.visit(|c| all.push((c.batch, c.phase, c.first, c.experts.to_vec())));
        all
    }

    /// With a checksum that matches what the bytes have become.
    fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
        let body = bytes.len() - 8;
        let sum = checksum(&bytes[..body]);
        bytes[body..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    #[test]
    fn a_trace_comes_back_as_it_was_recorded() {
        let trace = example();
        let expected = [
            (0, Phase::Prompt, 0, vec![7, 0, 1, 2]),
            (0, Phase::Prompt, 8, vec![299, 0, 256, 5, 6, 7]),
            (1, Phase::Answer, 0, vec![5, 6]),
            (1, Phase::Answer, 8, vec![1, 2, 3]),
        ];
        assert_eq!(visited(&trace), expected);
        assert_eq!((trace.tokens(Phase::Prompt), trace.tokens(Phase::Answer)), (2, 1));
        let back = Trace::decode(&trace.encode()).unwrap();
        assert_eq!(back.layers(), layers());
        assert_eq!(visited(&back), expected);
    }

    #[test]
    fn a_damaged_file_is_refused_wherever_the_damage_is() {
        let bytes = example().encode();
        for at in 0..bytes.len() {
            assert!(Trace::decode(&bytes[..at]).is_err(), "cut at {at}");
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x10;
            assert!(Trace::decode(&flipped).is_err(), "flipped at {at}");
        }
    }

    /// A checksum that matches proves nothing about who wrote the file.
    #[test]
    fn a_hostile_file_is_refused_or_read_and_never_a_panic() {
        let bytes = example().encode();
        for at in 0..bytes.len() - 8 {
            for value in [0, 1, 2, 0x7f, 0x80, 0xff] {
                let mut hostile = bytes.clone();
                hostile[at] = value;
                if let Ok(trace) = Trace::decode(&sealed(hostile)) {
                    visited(&trace);
                }
            }
            let mut cut = bytes[..at].to_vec();
            cut.extend([0; 8]);
            assert!(Trace::decode(&sealed(cut)).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn errors_say_what_is_wrong() {
        let bytes = example().encode();
        let error = |bytes: &[u8]| Trace::decode(bytes).unwrap_err();
        assert!(error(b"GGUF").contains("is not a routing trace"));
        let mut newer = bytes.clone();
        newer[MAGIC.len()] = 9;
        assert!(error(&newer).contains("version 9"));
        assert!(error(&bytes[..bytes.len() - 1]).contains("checksum"));
        // The first choice comes after the header, the tag and the count.
        let mut beyond = bytes.clone();
        beyond[MAGIC.len() + 8 + 3 * 16 + 5] = 8;
        assert!(error(&sealed(beyond)).contains("names expert 8 of 8 in layer 1"));
        let none = Trace::new(vec![RoutedLayer::default()]).unwrap_err().to_string();
        assert!(none.contains("no routed experts"), "{none}");
    }
}
