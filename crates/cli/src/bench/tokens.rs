//! The tokens of a measurement: the same in every run, so that results can be compared.

use std::path::Path;

use anyhow::{Context, Result, bail};
use forebay_engine::TokenId;

use crate::args::read_text;
use crate::errors;

/// Pseudo-random tokens of a vocabulary of `vocab`: the numbers of SplitMix64 from the state 0, the upper half of
/// each as a fraction of the vocabulary. Real text would choose fewer different experts.
pub fn random(vocab: usize, count: usize) -> Vec<TokenId> {
    let mut state = 0u64;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (0..count).map(|_| TokenId((((next() >> 32) * vocab as u64) >> 32) as u32)).collect()
}

/// The tokens of a file, repeated as needed.
pub fn from_file(path: &Path, vocab: usize, count: usize) -> Result<Vec<TokenId>> {
    let tokens = parse(&read_text(path)?).with_context(|| path.display().to_string())?;
    if tokens.is_empty() {
        return Err(errors::usage(format!("{} contains no tokens", path.display())));
    }
    if let Some(TokenId(id)) = tokens.iter().find(|t| t.0 as usize >= vocab) {
        bail!("{}: token {id} is not in the vocabulary of {vocab} tokens", path.display());
    }
    Ok(tokens.into_iter().cycle().take(count).collect())
}

/// Numbers between spaces and commas, perhaps in the brackets in which `tokenize --ids` prints them.
fn parse(text: &str) -> Result<Vec<TokenId>> {
    let words = text.split(|c: char| c.is_whitespace() || matches!(c, ',' | '[' | ']'));
    let number =
        |word: &str| Ok(TokenId(word.parse().with_context(|| format!("{word:?} is not a token number"))?));
    words.filter(|word| !word.is_empty()).map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of the published generator from the state 0 are e220a8397b1dcdaf, 6e789e6aa1b965f4 and
    /// 06c45d188009454f.
    #[test]
    fn random_tokens_are_those_of_splitmix64() {
        let high = [0xe220_a839_u64, 0x6e78_9e6a, 0x06c4_5d18];
        let expected = high.map(|h| TokenId(((h * 1000) >> 32) as u32));
        assert_eq!(random(1000, 3), expected);
        assert!(random(7, 1000).iter().all(|t| t.0 < 7));
        assert!((0..7).all(|t| random(7, 1000).contains(&TokenId(t))));
    }

    #[test]
    fn numbers_are_found_however_they_are_separated() {
        assert_eq!(parse("[1, 2,3]\n4 5\n").unwrap(), [1, 2, 3, 4, 5].map(TokenId));
        assert_eq!(parse(" \n").unwrap(), []);
        let message = format!("{:#}", parse("1 two").unwrap_err());
        assert!(message.starts_with("\"two\" is not a token number"), "{message}");
    }
}
