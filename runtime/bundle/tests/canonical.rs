//! Canonical msgpack: one encoding per value, and nothing else is read.

use oxide_bundle::msgpack::{self, check_canonical};
use proptest::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sample {
    zebra: u64,
    apple: Option<String>,
    list: Vec<u32>,
    map: BTreeMap<String, i64>,
    choice: Choice,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Choice {
    Plain,
    One(u16),
    Named { y: bool, a: u8 },
}

fn choice() -> impl Strategy<Value = Choice> {
    prop_oneof![
        Just(Choice::Plain),
        any::<u16>().prop_map(Choice::One),
        (any::<bool>(), any::<u8>()).prop_map(|(y, a)| Choice::Named { y, a }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_value_round_trips(
        zebra in any::<u64>(),
        apple in prop::option::of(".{0,300}"),
        list in prop::collection::vec(any::<u32>(), 0..40),
        map in prop::collection::btree_map(".{0,40}", any::<i64>(), 0..20),
        choice in choice(),
    ) {
        let value = Sample { zebra, apple, list, map, choice };
        let bytes = msgpack::encode(&value).expect("the value encodes");
        prop_assert_eq!(check_canonical(&bytes), Ok(()));
        prop_assert_eq!(msgpack::decode::<Sample>(&bytes), Ok(value));
    }
}

#[test]
fn keys_are_sorted_at_every_level() {
    let value = Sample { zebra: 1, apple: None, list: vec![], map: BTreeMap::new(), choice: Choice::Named { y: true, a: 2 } };
    let bytes = msgpack::encode(&value).expect("the value encodes");
    let expected = b"\x85\xa5apple\xc0\xa6choice\x81\xa5named\x82\xa1a\x02\xa1y\xc3\xa4list\x90\xa3map\x80\xa5zebra\x01";
    assert_eq!(bytes, expected);
}

#[test]
fn other_encodings_are_refused() {
    let cases: &[(&[u8], &str)] = &[
        (b"", "unexpected end"),
        (b"\x01\x01", "trailing bytes"),
        (b"\xcc\x7f", "shortest form"),
        (b"\xcd\x00\xff", "shortest form"),
        (b"\xce\x00\x00\xff\xff", "shortest form"),
        (b"\xcf\x00\x00\x00\x00\xff\xff\xff\xff", "shortest form"),
        (b"\xd0\xe0", "shortest form"),
        (b"\xd0\x05", "shortest form"),
        (b"\xd1\xff\x80", "shortest form"),
        (b"\xd2\xff\xff\x80\x00", "shortest form"),
        (b"\xd3\xff\xff\xff\xff\x80\x00\x00\x00", "shortest form"),
        (b"\xd9\x01a", "shortest form"),
        (b"\xda\x00\x20aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "shortest form"),
        (b"\xc5\x00\x01a", "shortest form"),
        (b"\xdc\x00\x01\x01", "shortest form"),
        (b"\xdd\x00\x00\x00\x10", "shortest form"),
        (b"\xde\x00\x00", "shortest form"),
        (b"\xca\x00\x00\x00\x00", "float"),
        (b"\xcb\x00\x00\x00\x00\x00\x00\x00\x00", "float"),
        (b"\xd4\x01\x00", "ext"),
        (b"\xc1", "ext or reserved"),
        (b"\x82\xa1b\x01\xa1a\x01", "not rising"),
        (b"\x82\xa1a\x01\xa1a\x01", "occurs twice"),
        (b"\x81\x01\x01", "key is not a string"),
        (b"\xa1\xff", "UTF-8"),
        (b"\xa5ab", "past the end"),
        (b"\xc4\x09ab", "past the end"),
        (b"\xdd\xff\xff\xff\xff", "more items than bytes"),
        (b"\xdf\xff\xff\xff\xff", "more items than bytes"),
        (b"\x91", "more items than bytes"),
        (&[0x91; 40], "deeper than 16"),
    ];
    for (bytes, reason) in cases {
        let error = check_canonical(bytes).expect_err("the bytes are not canonical").to_string();
        assert!(error.contains(reason), "{bytes:02x?}: wanted {reason:?}, got {error}");
    }
    for sound in [b"\xd0\xdf".as_slice(), b"\xd1\xff\x7f", b"\xd2\xff\xff\x7f\xff", b"\xcc\x80", b"\xcd\x01\x00", b"\xe0"] {
        assert_eq!(check_canonical(sound), Ok(()), "{sound:02x?}");
    }
}

#[test]
fn sixteen_levels_are_the_limit_both_ways() {
    let nested = |depth: usize| [vec![0x91; depth], vec![0xc0]].concat();
    assert_eq!(check_canonical(&nested(16)), Ok(()));
    assert!(check_canonical(&nested(17)).is_err());
    let mut value = serde_json::json!(null);
    for _ in 0..17 {
        value = serde_json::json!([value]);
    }
    assert!(msgpack::encode(&value).is_err());
}

#[test]
fn values_without_a_canonical_form_are_not_encoded() {
    assert!(msgpack::encode(&1.5_f32).is_err());
    assert!(msgpack::encode(&BTreeMap::from([(1_u32, 2_u32)])).is_err());
}

#[test]
fn a_missing_optional_field_is_not_the_canonical_form() {
    let bytes = b"\x84\xa6choice\xa5plain\xa4list\x90\xa3map\x80\xa5zebra\x01";
    assert_eq!(check_canonical(bytes), Ok(()));
    assert!(msgpack::decode::<Sample>(bytes).is_err());
}

#[test]
fn an_array_in_place_of_a_map_is_not_the_canonical_form() {
    let bytes = b"\x95\x01\xc0\x90\x80\xa5plain";
    assert_eq!(check_canonical(bytes), Ok(()));
    assert!(msgpack::decode::<Sample>(bytes).is_err());
}
