//! Sets of signatures: one encoding, in order, bounded; and what they sign.

mod fixture;

use fixture::*;
use oxide_bundle::container::check_header;
use oxide_bundle::signature::{SIGNATURES_MAX, Signature, SignatureError, Signatures, message};
use oxide_bundle::{Digest, msgpack};

fn signature(key: u8) -> Signature {
    Signature { key: Digest([key; 32]), r: Digest([1; 32]), s: Digest([2; 32]) }
}

#[test]
fn a_set_is_kept_in_order_with_one_signature_a_key() {
    let mut set = Signatures::default();
    for key in [9, 3, 5] {
        set.put(signature(key));
    }
    set.put(Signature { r: Digest([7; 32]), ..signature(3) });
    let keys: Vec<u8> = set.signatures.iter().map(|signature| signature.key.0[0]).collect();
    assert_eq!((keys, set.signatures[0].r), (vec![3, 5, 9], Digest([7; 32])));
    assert_eq!(Signatures::decode(&set.encode().expect("small")), Ok(set));
}

#[test]
fn other_orders_doubles_and_too_many_are_refused() {
    for keys in [vec![5, 3], vec![3, 3]] {
        let bytes = msgpack::encode(&Signatures { signatures: keys.into_iter().map(signature).collect() }).expect("encodes");
        assert_eq!(Signatures::decode(&bytes), Err(SignatureError::Order(2)));
    }
    let many = Signatures { signatures: vec![signature(1); SIGNATURES_MAX + 1] };
    assert_eq!(many.encode(), Err(SignatureError::Order(SIGNATURES_MAX + 1)));
    assert!(matches!(Signatures::decode(b"garbage"), Err(SignatureError::Encoding(_))));
}

#[test]
fn a_full_set_fits_the_trailer_and_the_reader_gives_it_back() {
    let mut set = Signatures::default();
    (0..=255).for_each(|key| set.put(signature(key)));
    let mut bytes = sealed();
    bytes.extend(set.trailer().expect("it fits"));
    let bundle = open(bytes).expect("the bundle is sound");
    assert_eq!(bundle.trailer().map(Signatures::decode), Some(Ok(set)));
}

#[test]
fn the_message_is_domain_and_roots() {
    let bytes = sealed();
    let superblock = check_header(bytes.first_chunk().expect("4 KiB")).expect("sound");
    let roots = [&bytes[176..208], &bytes[208..240], &bytes[240..272], &bytes[272..304]].concat();
    assert_eq!(message(&superblock), [b"oxb signature v1\0", roots.as_slice()].concat());
}
