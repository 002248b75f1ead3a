//! Generated text, token by token: pieces are whole characters, and together they are the text of all tokens.

use smidgen::internal::TextStream;
use smidgen_formats::tokenizer::Tokenizer;
use std::path::Path;

#[test]
fn text_comes_in_whole_characters_as_its_tokens_come() {
    const TEXTS: [&str; 4] = [
        "Ünïcödé naïve café Straße русский текст 日本語のテキスト 한국어",
        "e\u{301}a\u{300} 👍🏽 🙂🙂 \u{200d}\u{a0}\u{2003}x",
        " Hello  world   ",
        "The quick brown fox didn't, THEY'VE seen it.\n\n  g\t\th",
    ];
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/sft");
    for name in ["byte_level", "sentence_piece"] {
        let tokenizer = Tokenizer::from_folder(&fixtures.join(name)).unwrap();
        for text in TEXTS {
            let ids = tokenizer.encode(text, false).unwrap();
            let mut stream = TextStream::default();
            let mut pieces = Vec::new();
            for id in &ids {
                let piece = stream.push(&tokenizer, *id).unwrap();
                assert!(!piece.contains('\u{fffd}'), "{name}: {piece:?} of {text:?}");
                pieces.push(piece);
            }
            pieces.push(stream.finish(&tokenizer).unwrap());
            assert_eq!(pieces.concat(), tokenizer.decode(&ids, true).unwrap(), "{name}");
            assert!(pieces.iter().filter(|piece| !piece.is_empty()).count() > 3, "{name}: all at once");
            // Cut inside a character: what is there of it comes at the end.
            let mut stream = TextStream::default();
            let some = &ids[..ids.len() / 2];
            let mut got = String::new();
            for id in some {
                got += &stream.push(&tokenizer, *id).unwrap();
            }
            got += &stream.finish(&tokenizer).unwrap();
            assert_eq!(got, tokenizer.decode(some, true).unwrap(), "{name}: cut");
        }
    }
}
