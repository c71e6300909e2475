use super::*;
use proptest::prelude::*;

/// Every step off, at temperature 1.
fn plain() -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: Some(1),
        ..SamplingParams::default()
    }
}

fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, ..plain() }
}

fn sampler(params: SamplingParams, vocab_size: usize) -> Sampler {
    Sampler::new(params, vocab_size).expect("the parameters are in range")
}

/// What greedy sampling takes under `params`, which say nothing about temperature.
fn best(params: SamplingParams, prompt: &[u32], answer: &[u32], logits: &[f32]) -> u32 {
    let mut s = sampler(SamplingParams { temperature: 0.0, ..params }, logits.len());
    s.accept_prompt(&prompt.iter().map(|&t| TokenId(t)).collect::<Vec<_>>());
    answer.iter().for_each(|&t| s.accept(TokenId(t)));
    s.sample(logits).unwrap().0
}

/// The tokens that pass all filters, in ascending order.
fn survivors(params: SamplingParams, logits: &[f32]) -> Vec<u32> {
    let mut s = sampler(params, logits.len());
    s.sample(logits).unwrap();
    let mut tokens: Vec<u32> = s.candidates.iter().map(|c| c.token).collect();
    tokens.sort_unstable();
    tokens
}

/// Logits under which token i has probability `p[i]` at temperature 1.
fn logits_of(p: &[f32]) -> Vec<f32> {
    p.iter().map(|p| p.ln()).collect()
}

/// Some logits without a pattern: 64 values from -4 to 4.
fn rugged() -> Vec<f32> {
    (0..64u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 16) as f32 / 8192.0 - 4.0).collect()
}

#[test]
fn greedy_takes_the_highest_logit_and_of_equals_the_first() {
    assert_eq!(best(plain(), &[], &[], &[0.0, 2.0, 1.0]), 1);
    assert_eq!(best(plain(), &[], &[], &[0.0, 2.0, 2.0]), 1);
    assert_eq!(best(plain(), &[], &[], &[-0.0, 0.0]), 0);
    assert_eq!(best(plain(), &[], &[], &[f32::NEG_INFINITY, f32::MIN]), 1);
}

#[test]
fn greedy_uses_no_random_numbers() {
    let mut s = sampler(greedy(), 3);
    s.sample(&[0.0, 1.0, 2.0]).unwrap();
    assert_eq!(s.rng.get_word_pos(), 0);
}

#[test]
fn every_drawn_token_takes_one_random_number() {
    // One token is certain in the first case, and it takes a number all the same.
    for logits in [[0.0, f32::NEG_INFINITY], [0.0, 0.0]] {
        let mut s = sampler(plain(), 2);
        s.sample(&logits).unwrap();
        assert_eq!(s.rng.get_word_pos(), 2);
    }
}

#[test]
fn a_bias_is_added_before_anything_else() {
    let bias = |list: &[(u32, f32)]| SamplingParams {
        logit_bias: list.iter().map(|&(t, b)| (TokenId(t), b)).collect(),
        ..plain()
    };
    assert_eq!(best(bias(&[(2, 1.5)]), &[], &[], &[0.0, 1.0, 0.0]), 2);
    assert_eq!(best(bias(&[(2, 0.75), (2, 0.75)]), &[], &[], &[0.0, 1.0, 0.0]), 2);
    assert_eq!(best(bias(&[(1, f32::NEG_INFINITY)]), &[], &[], &[0.0, 1.0, -1.0]), 0);
    // The bias makes the logit 3 and the penalty halves that; the other way round 2.5 would win.
    let both = SamplingParams { repeat_penalty: 2.0, ..bias(&[(0, 2.0)]) };
    assert_eq!(best(both, &[0], &[], &[1.0, 2.0]), 1);
}

#[test]
fn a_bias_outside_the_vocabulary_is_refused() {
    let params = SamplingParams { logit_bias: vec![(TokenId(3), 1.0)], ..plain() };
    let message = Sampler::new(params, 3).unwrap_err().to_string();
    assert_eq!(message, "logit_bias names token 3, but the vocabulary ends at 2");
}

#[test]
fn a_token_that_is_listed_often_has_one_bias() {
    let many = (0..100_000).map(|i| (TokenId(i % 2), if i % 2 == 0 { 0.5 } else { -1.0 }));
    let never = [(TokenId(2), f32::NEG_INFINITY), (TokenId(2), 1.0)];
    let most = [(TokenId(3), f32::MAX), (TokenId(3), f32::MAX)];
    let logit_bias = many.chain(never).chain(most).collect();
    let sampler = Sampler::new(SamplingParams { logit_bias, ..plain() }, 4).unwrap();
    let sums = [25_000.0, -50_000.0, f32::NEG_INFINITY, f32::MAX];
    let expected: Vec<_> = sums.into_iter().enumerate().map(|(i, sum)| (TokenId(i as u32), sum)).collect();
    assert_eq!(sampler.params().logit_bias, expected);
}

#[test]
fn repetition_shrinks_positive_logits_and_sinks_negative_ones() {
    let params = || SamplingParams { repeat_penalty: 2.0, ..plain() };
    assert_eq!(best(params(), &[], &[0], &[2.0, 1.5]), 1);
    assert_eq!(best(params(), &[], &[0], &[2.0, 0.5]), 0);
    assert_eq!(best(params(), &[], &[0], &[-1.0, -1.5]), 1);
    assert_eq!(best(params(), &[], &[0], &[-1.0, -2.5]), 0);
    // Once is as often as ten times, and the prompt counts like the answer.
    assert_eq!(best(params(), &[], &[0; 10], &[2.0, 0.5]), 0);
    assert_eq!(best(params(), &[0], &[], &[2.0, 1.5]), 1);
}

#[test]
fn presence_counts_once_and_frequency_each_time() {
    let presence = || SamplingParams { presence_penalty: 1.0, ..plain() };
    assert_eq!(best(presence(), &[], &[0], &[2.0, 1.5]), 1);
    assert_eq!(best(presence(), &[], &[0, 0, 0], &[2.0, 0.5]), 0);

    let frequency = || SamplingParams { frequency_penalty: 0.5, ..plain() };
    assert_eq!(best(frequency(), &[], &[0], &[2.0, 1.25]), 0);
    assert_eq!(best(frequency(), &[], &[0, 0], &[2.0, 1.25]), 1);
}

#[test]
fn presence_and_frequency_leave_the_prompt_alone() {
    let params = SamplingParams { presence_penalty: 1.0, frequency_penalty: 1.0, ..plain() };
    assert_eq!(best(params, &[0, 0, 0], &[1], &[2.0, 3.75]), 0);
}

#[test]
fn penalties_look_at_the_last_n_tokens() {
    let repeat = |n| SamplingParams { repeat_penalty: 2.0, penalty_last_n: n, ..plain() };
    let logits = [2.0, 1.5, 0.0];
    assert_eq!(best(repeat(0), &[], &[0], &logits), 0);
    assert_eq!(best(repeat(2), &[], &[0, 2], &logits), 1);
    assert_eq!(best(repeat(2), &[], &[0, 2, 2], &logits), 0);
    assert_eq!(best(repeat(2), &[0], &[2, 2], &logits), 0);
    assert_eq!(best(repeat(usize::MAX), &[0], &[2; 500], &logits), 1);

    // A token that occurs twice loses one occurrence at a time.
    let frequency = || SamplingParams { frequency_penalty: 0.5, penalty_last_n: 2, ..plain() };
    assert_eq!(best(frequency(), &[], &[0, 0, 2], &[2.0, 1.25, 0.0]), 0);
    assert_eq!(best(frequency(), &[], &[0, 0, 2], &[2.0, 1.75, 0.0]), 1);
}

#[test]
fn a_token_outside_the_vocabulary_in_the_history_is_harmless() {
    let params = SamplingParams { repeat_penalty: 2.0, ..plain() };
    assert_eq!(best(params, &[99], &[u32::MAX], &[1.0, 2.0]), 1);
}

#[test]
fn top_k_keeps_the_k_likeliest_and_of_equals_the_first() {
    let params = |top_k| SamplingParams { top_k, ..plain() };
    let logits = [1.0, 3.0, 2.0, 3.0, 2.0];
    assert_eq!(survivors(params(1), &logits), [1]);
    assert_eq!(survivors(params(1), &[-0.0, 0.0]), [0]);
    assert_eq!(survivors(params(2), &logits), [1, 3]);
    assert_eq!(survivors(params(3), &logits), [1, 2, 3]);
    assert_eq!(survivors(params(99), &logits), [0, 1, 2, 3, 4]);
    assert_eq!(survivors(params(0), &logits), [0, 1, 2, 3, 4]);
}

#[test]
fn top_p_keeps_the_fewest_that_hold_p() {
    let params = |top_p| SamplingParams { top_p, ..plain() };
    let logits = logits_of(&[0.1, 0.5, 0.15, 0.25]);
    assert_eq!(survivors(params(0.0), &logits), [1]);
    assert_eq!(survivors(params(0.45), &logits), [1]);
    assert_eq!(survivors(params(0.7), &logits), [1, 3]);
    assert_eq!(survivors(params(0.8), &logits), [1, 2, 3]);
    assert_eq!(survivors(params(0.95), &logits), [0, 1, 2, 3]);
    assert_eq!(survivors(params(1.0), &logits), [0, 1, 2, 3]);
    // Holding exactly p is enough.
    assert_eq!(survivors(params(0.5), &[1.0, 1.0]), [0]);
}

#[test]
fn min_p_is_relative_to_the_likeliest() {
    let params = |min_p| SamplingParams { min_p, ..plain() };
    let logits = logits_of(&[0.1, 0.5, 0.15, 0.25]);
    assert_eq!(survivors(params(0.1), &logits), [0, 1, 2, 3]);
    assert_eq!(survivors(params(0.25), &logits), [1, 2, 3]);
    assert_eq!(survivors(params(0.45), &logits), [1, 3]);
    assert_eq!(survivors(params(0.55), &logits), [1]);
    assert_eq!(survivors(params(1.0), &[2.0, 1.0, 2.0]), [0, 2]);
}

#[test]
fn filters_see_the_distribution_after_temperature_and_the_filters_before_them() {
    let logits = logits_of(&[0.1, 0.5, 0.15, 0.25]);
    // At temperature 0.5 the weights are the squares of these, and token 1 has 0.25 of 0.345, which is 72%.
    let cool = SamplingParams { temperature: 0.5, ..plain() };
    assert_eq!(survivors(SamplingParams { top_p: 0.7, ..cool.clone() }, &logits), [1]);
    assert_eq!(survivors(SamplingParams { min_p: 0.3, ..cool }, &logits), [1]);
    // Top-p reckons with what top-k left: 0.5 is two thirds of 0.75.
    assert_eq!(survivors(SamplingParams { top_k: 2, top_p: 0.6, ..plain() }, &logits), [1]);
}

#[test]
fn draws_follow_the_distribution() {
    let cases: [(SamplingParams, &[f32]); 3] = [
        (plain(), &[0.05, 0.3, 0.1, 0.25, 0.2, 0.1]),
        // Probabilities are squared and then brought back to a sum of 1.
        (SamplingParams { temperature: 0.5, ..plain() }, &[0.0025, 0.09, 0.01, 0.0625, 0.04, 0.01]),
        (SamplingParams { top_k: 3, ..plain() }, &[0.0, 0.3, 0.0, 0.25, 0.2, 0.0]),
    ];
    let logits = logits_of(&[0.05, 0.3, 0.1, 0.25, 0.2, 0.1]);
    for (params, weights) in cases {
        const DRAWS: usize = 20_000;
        let mut s = sampler(params.clone(), logits.len());
        let mut counts = [0u32; 6];
        for _ in 0..DRAWS {
            counts[s.sample(&logits).unwrap().0 as usize] += 1;
        }
        let total: f32 = weights.iter().sum();
        let mut chi_square = 0.0;
        for (&count, &weight) in counts.iter().zip(weights) {
            let expected = f64::from(weight / total) * DRAWS as f64;
            if expected == 0.0 {
                assert_eq!(count, 0);
            } else {
                chi_square += (f64::from(count) - expected).powi(2) / expected;
            }
        }
        // Five degrees of freedom stay below this with probability 0.999.
        assert!(chi_square < 20.5, "{params:?}: {counts:?} gives {chi_square}");
    }
}

/// The tokens were computed by a separate program from the definitions of ChaCha8 and of the steps.
#[test]
fn a_seed_gives_the_recorded_tokens() {
    let tokens = |params| {
        let mut s = sampler(params, 64);
        let mut draw = || {
            let token = s.sample(&rugged()).unwrap();
            s.accept(token);
            token.0
        };
        (0..16).map(|_| draw()).collect::<Vec<_>>()
    };
    let seeded = |params| SamplingParams { seed: Some(42), ..params };
    assert_eq!(tokens(seeded(plain())), [50, 63, 29, 42, 21, 11, 21, 55, 55, 19, 37, 58, 63, 42, 50, 16]);
    assert_eq!(
        tokens(seeded(SamplingParams::default())),
        [50, 32, 8, 29, 42, 21, 42, 3, 37, 21, 63, 45, 53, 29, 16, 21]
    );
    let top_k_alone = SamplingParams { top_p: 1.0, min_p: 0.0, ..SamplingParams::default() };
    assert_eq!(tokens(seeded(top_k_alone)), [16, 61, 8, 50, 42, 21, 42, 58, 3, 21, 63, 32, 61, 29, 37, 21]);
    let penalised = SamplingParams {
        repeat_penalty: 1.3,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        ..SamplingParams::default()
    };
    assert_eq!(tokens(seeded(penalised)), [50, 19, 8, 16, 21, 55, 63, 21, 32, 29, 24, 6, 27, 45, 53, 42]);
}

#[test]
fn a_made_up_seed_can_be_given_again() {
    let unseeded = SamplingParams { seed: None, ..plain() };
    let mut first = sampler(unseeded.clone(), 64);
    let mut second = sampler(SamplingParams { seed: Some(first.seed()), ..plain() }, 64);
    for _ in 0..32 {
        assert_eq!(first.sample(&rugged()).unwrap(), second.sample(&rugged()).unwrap());
    }
    // Five equal seeds in a row do not come from a source of randomness.
    assert!((0..5).any(|_| sampler(unseeded.clone(), 64).seed() != first.seed()));
}

#[test]
fn a_nan_is_never_chosen() {
    assert_eq!(best(plain(), &[], &[], &[f32::NAN, -5.0, -f32::NAN]), 1);
    let mut s = sampler(plain(), 3);
    for _ in 0..100 {
        assert_eq!(s.sample(&[f32::NAN, -5.0, f32::NEG_INFINITY]).unwrap(), TokenId(1));
    }
}

#[test]
fn infinite_logits_and_overflow_do_no_harm() {
    let biased = |bias| SamplingParams { logit_bias: vec![(TokenId(1), bias)], ..plain() };
    assert_eq!(survivors(SamplingParams { min_p: 0.5, ..plain() }, &[0.0, f32::INFINITY]), [1]);
    assert_eq!(survivors(SamplingParams { min_p: 0.5, ..biased(f32::MAX) }, &[0.0, f32::MAX]), [1]);
    assert_eq!(best(biased(f32::NEG_INFINITY), &[], &[], &[0.0, f32::INFINITY]), 0);
}

#[test]
fn logits_without_a_finite_one_are_an_error() {
    for params in [plain(), greedy()] {
        for value in [f32::NAN, f32::NEG_INFINITY] {
            let message = sampler(params.clone(), 3).sample(&[value; 3]).unwrap_err().to_string();
            assert!(message.contains("no finite logits"), "{message}");
        }
    }
}

#[test]
fn logits_of_another_vocabulary_are_an_error() {
    assert!(sampler(plain(), 3).sample(&[0.0; 4]).is_err());
    assert!(Sampler::new(plain(), 0).is_err());
}

#[test]
fn parameters_out_of_range_make_no_sampler() {
    let params = SamplingParams { top_p: f32::NAN, ..plain() };
    assert!(Sampler::new(params, 3).unwrap_err().to_string().starts_with("top_p is NaN"));
}

#[test]
fn our_exponential_agrees_with_the_library() {
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(-1e9), 0.0);
    assert_eq!(exp(f64::NEG_INFINITY), 0.0);
    for i in 0..100_000 {
        let x = -f64::from(i) * 0.00707;
        let error = (exp(x) / x.exp() - 1.0).abs();
        assert!(error < 4.0 * f64::EPSILON, "exp({x}) is off by {error}");
    }
}

/// The filters as their definitions put them: sort everything, then cut.
fn reference_survivors(params: &SamplingParams, logits: &[f32]) -> Vec<u32> {
    let mut ranked: Vec<u32> = (0..logits.len() as u32).collect();
    ranked.sort_by(|&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).unwrap());
    if params.top_k > 0 {
        ranked.truncate(params.top_k);
    }
    let max = f64::from(logits[ranked[0] as usize]);
    let weight = |&t: &u32| ((f64::from(logits[t as usize]) - max) / f64::from(params.temperature)).exp();

    let total: f64 = ranked.iter().map(weight).sum();
    let holds_p = |n: &usize| ranked[..*n].iter().map(weight).sum::<f64>() >= f64::from(params.top_p) * total;
    let n = (1..=ranked.len()).find(holds_p).unwrap_or(ranked.len());
    let n = if params.top_p < 1.0 { n } else { ranked.len() };

    let mut kept: Vec<u32> =
        ranked[..n].iter().copied().filter(|t| weight(t) >= f64::from(params.min_p)).collect();
    kept.sort_unstable();
    kept
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 400, ..Default::default() })]

    /// Steps of a half make many ties; the sizes go past what is sorted at first.
    #[test]
    fn the_filters_keep_what_their_definitions_say(
        steps in prop::collection::vec(-30i32..10, 1..1500),
        top_k in prop_oneof![Just(0usize), 1usize..60, 200usize..1500],
        top_p in prop_oneof![Just(1.0f32), 0.01f32..0.9999],
        min_p in prop_oneof![Just(0.0f32), 0.0001f32..0.9],
        temperature in 0.3f32..20.0,
    ) {
        let logits: Vec<f32> = steps.iter().map(|&s| s as f32 * 0.5).collect();
        let params = SamplingParams { temperature, top_k, top_p, min_p, ..plain() };
        prop_assert_eq!(survivors(params.clone(), &logits), reference_survivors(&params, &logits));
    }

    /// The likeliest tokens lead to the token that all logits lead to, or to none.
    #[test]
    fn the_likeliest_tokens_decide_as_all_do(
        steps in prop::collection::vec(-30i32..10, 1..600),
        odd in prop::collection::vec((0usize..600, prop::sample::select(
            vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, f32::MAX],
        )), 0..4),
        told in 1usize..300,
        top_k in prop_oneof![Just(0usize), 1usize..60],
        top_p in prop_oneof![Just(1.0f32), 0.01f32..0.9999],
        min_p in prop_oneof![Just(0.0f32), 0.0001f32..0.9],
        temperature in prop_oneof![Just(0.0f32), 0.1f32..5.0],
        penalties in prop_oneof![
            Just([1.0f32, 0.0, 0.0]),
            (1.0f32..2.0, 0.0f32..2.0, 0.0f32..2.0).prop_map(|(r, p, f)| [r, p, f]),
            (0.5f32..2.0, -2.0f32..2.0, -2.0f32..2.0).prop_map(|(r, p, f)| [r, p, f]),
        ],
        history in prop::collection::vec(0u32..600, 0..40),
        bias in prop::collection::vec((0u32..600, prop_oneof![
            Just(f32::NEG_INFINITY), -5.0f32..0.0, -5.0f32..5.0,
        ]), 0..4),
        mask in prop::option::of(prop::collection::vec(any::<u32>(), 0..19)),
        seed in any::<u64>(),
    ) {
        let mut logits: Vec<f32> = steps.iter().map(|&s| s as f32 * 0.5).collect();
        odd.iter().for_each(|&(i, odd)| if let Some(logit) = logits.get_mut(i) { *logit = odd });
        let [repeat_penalty, presence_penalty, frequency_penalty] = penalties;
        let logit_bias = bias.into_iter().filter(|(t, _)| (*t as usize) < logits.len());
        let params = SamplingParams {
            temperature, top_k, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty,
            logit_bias: logit_bias.map(|(t, b)| (TokenId(t), b)).collect(),
            seed: Some(seed),
            ..plain()
        };
        let mut all = sampler(params, logits.len());
        history.into_iter().for_each(|t| all.accept(TokenId(t)));
        let mut few = all.clone();
        if let Some(token) = few.sample_best(likeliest(&logits, told, &mut Vec::new()), mask.as_deref()) {
            prop_assert_eq!(token, all.sample_among(&logits, mask.as_deref()).unwrap());
            prop_assert_eq!(few.rng.get_word_pos(), all.rng.get_word_pos());
        } else {
            prop_assert_eq!(few.rng.get_word_pos(), 0);
        }
    }

    /// Whatever the logits are, a token comes out that may be chosen, or an error if there is none.
    #[test]
    fn any_logits_give_a_possible_token_or_an_error(
        logits in prop::collection::vec(any::<u32>().prop_map(f32::from_bits), 1..40),
        temperature in prop_oneof![Just(0.0f32), Just(f32::MIN_POSITIVE), 0.1f32..3.0, Just(f32::MAX)],
        repeat_penalty in prop_oneof![Just(1.0f32), Just(f32::MIN_POSITIVE), Just(f32::MAX)],
        top_p in 0.0f32..=1.0,
    ) {
        let params = SamplingParams { temperature, repeat_penalty, top_p, ..SamplingParams::default() };
        let mut s = sampler(params, logits.len());
        s.accept(TokenId(0));
        match s.sample(&logits) {
            Ok(token) => prop_assert!(logits[token.0 as usize] > f32::NEG_INFINITY),
            Err(_) => prop_assert!(logits[1..].iter().all(|&l| l.is_nan() || l == f32::NEG_INFINITY)),
        }
    }
}

#[test]
fn only_allowed_tokens_are_chosen() {
    // Tokens 1, 33 and 64 of 70; the rest of the bits is missing.
    let allowed = [1 << 1, 1 << 1, 1];
    let logits: Vec<f32> = (0..70).map(|i| i as f32).collect();
    let mut greedy =
        Sampler::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() }, 70).unwrap();
    assert_eq!(greedy.sample_among(&logits, Some(&allowed)).unwrap(), TokenId(64));
    assert_eq!(greedy.sample_among(&logits, Some(&allowed[..2])).unwrap(), TokenId(33));
    assert_eq!(greedy.sample_among(&logits, Some(&[u32::MAX; 3])).unwrap(), greedy.sample(&logits).unwrap());
    let params = SamplingParams {
        temperature: 1000.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: Some(3),
        logit_bias: vec![(TokenId(5), 1e6)],
        ..SamplingParams::default()
    };
    let mut wild = Sampler::new(params, 70).unwrap();
    let mut chosen: Vec<u32> =
        (0..200).map(|_| wild.sample_among(&logits, Some(&allowed)).unwrap().0).collect();
    chosen.sort_unstable();
    chosen.dedup();
    assert_eq!(chosen, [1, 33, 64]);
    assert!(matches!(wild.sample_among(&logits, Some(&[])), Err(Error::Invalid(_))));
}

/// What a device tells of logits.
fn likeliest<'a>(logits: &[f32], count: usize, ranked: &'a mut Vec<Ranked>) -> Best<'a> {
    rank(logits, count, ranked);
    let all = ranked.len() < count || count >= logits.len();
    Best { others: if all { f32::NEG_INFINITY } else { ranked[count - 1].logit }, ranked }
}

#[test]
fn the_likeliest_tokens_decide_in_the_usual_cases() {
    let logits: Vec<f32> =
        (0..20_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 1e6).collect();
    let never = vec![(TokenId(7), f32::NEG_INFINITY)];
    let usual = [
        SamplingParams::default(),
        greedy(),
        SamplingParams { logit_bias: never, ..SamplingParams::default() },
        SamplingParams { repeat_penalty: 1.1, presence_penalty: 0.5, ..SamplingParams::default() },
        SamplingParams { top_k: 0, top_p: 1.0, min_p: 0.9, ..SamplingParams::default() },
    ];
    let mut ranked = Vec::new();
    for params in usual {
        let mut few = sampler(SamplingParams { seed: Some(9), ..params.clone() }, logits.len());
        let mut all = few.clone();
        for _ in 0..50 {
            let token = few.sample_best(likeliest(&logits, 256, &mut ranked), None);
            assert_eq!(token, all.sample(&logits).ok(), "{params:?}");
            few.accept(token.unwrap());
            all.accept(token.unwrap());
        }
    }
    // More than the likeliest count here.
    let raises = SamplingParams { logit_bias: vec![(TokenId(7), 1.0)], ..greedy() };
    for params in [plain(), raises, SamplingParams { top_k: 257, ..plain() }] {
        assert_eq!(sampler(params, 20_000).sample_best(likeliest(&logits, 256, &mut ranked), None), None);
    }
}
