//! Latent attention: queries, keys and values from latents of few channels, assembled into equal heads.
//!
//! A head of a query or key has its rotated channels first and the others after them, in either of which a score is the
//! same sum; a head of a value, or of a query, whichever is smaller, ends with zeros. So attention, its gradient, its
//! caches and rotation are those of any other decoder. The cost: if values are smaller than queries (DeepSeek-V3: 128 and
//! 192 channels), attention multiplies by the zeros too, a fifth more work, and the caches of generation hold whole keys
//! and values instead of latents. Heads are moved, not computed, so a backward pass assembles them again.

use crate::forward::Builder;
use crate::model::layer::{AttentionSpec, LATENT, LatentSpec, NormForm, QUERY_LATENT};
use smidgen_ir::{HeadPart, Op, ValueId};

impl Builder<'_> {
    /// Latent attention of n (T, C), projected to the residual stream.
    pub(crate) fn latent_attention(
        &mut self,
        attention: &AttentionSpec,
        latent: &LatentSpec,
        n: ValueId,
        tables: &[ValueId],
    ) -> ValueId {
        let LatentSpec { plain, rotated, value, .. } = *latent;
        let (layer, heads, width) =
            (self.layer.expect("attention belongs to a layer"), attention.heads, attention.head_dim);
        let rope = attention.rope.expect("latent attention has rotated channels");
        let q = self.latent_queries(attention, latent, n); // (T, H·(P+R))
        let turned_first = [(q, heads, plain, rotated, 0), (q, heads, 0, plain, rotated)];
        let q = self.heads(heads, width, &turned_first, "attn.q_heads"); // (T, H·D)
        let mut q = self.rotated(Some((rope.queries, rope)), heads, q, tables, "attn.q_turned");
        if let Some(scale) = latent.query_scale {
            // Every pair of channels is a head of its own, which is not turned.
            q = self.rotated(Some((scale, rope)), heads * width / 2, q, tables, "attn.q_scaled");
        }
        let (latent_rows, key) = self.latent_rows(latent, n); // (T, L), (T, R)
        let key = self.rotated(Some((rope.keys, rope)), 1, key, tables, "attn.k_turned"); // (T, R)
        let projected = self.linear(latent_rows, LATENT[2], "attn.kv"); // (T, H·(P+V))
        let parts = [(key, 1, 0, rotated, 0), (projected, heads, 0, plain, rotated)];
        let k = self.heads(heads, width, &parts, "attn.k_heads"); // (T, H·D)
        let v = self.heads(heads, width, &[(projected, heads, plain, value, 0)], "attn.v_heads"); // (T, H·D)
        self.keys_and_values.insert(layer, [k, v]);
        let mut o = self.attention(attention, q, true); // (T, H·D)
        if value < width {
            o = self.heads(heads, value, &[(o, heads, 0, value, 0)], "attn.o_heads"); // (T, H·V)
        }
        self.linear(o, attention.paths.output, "attn.out") // (T, C)
    }

    fn latent_queries(&mut self, attention: &AttentionSpec, latent: &LatentSpec, n: ValueId) -> ValueId {
        if latent.query_rank.is_none() {
            return self.linear(n, attention.paths.qkv[0], "attn.q");
        }
        let [to, norm, from] = QUERY_LATENT;
        let rows = self.linear(n, to, "attn.q_latent"); // (T, Q)
        let rows = self.norm(rows, NormForm::Rms(latent.norm), norm, "attn.q_latent_normed");
        self.linear(rows, from, "attn.q")
    }

    /// The normed latent of keys and values, and the channels of keys that will be rotated.
    fn latent_rows(&mut self, latent: &LatentSpec, n: ValueId) -> (ValueId, ValueId) {
        let both = self.linear(n, LATENT[0], "attn.latent"); // (T, L+R)
        let rows = self.columns(both, 0, latent.rank, 1, "attn.latent_rows");
        let key = self.columns(both, latent.rank, latent.rotated, 1, "attn.k_shared");
        (self.norm(rows, NormForm::Rms(latent.norm), LATENT[1], "attn.latent_normed"), key)
    }

    /// Heads of `width` channels from parts of other heads: value, its heads, first column, columns, and their place.
    fn heads(
        &mut self,
        heads: usize,
        width: usize,
        parts: &[(ValueId, usize, usize, usize, usize)],
        output: &str,
    ) -> ValueId {
        let inputs = parts.iter().map(|(value, ..)| *value).collect();
        let part = |&(_, heads, from, columns, to): &_| HeadPart { heads, from, columns, to };
        let parts = parts.iter().filter(|(.., columns, _)| *columns > 0).map(part).collect();
        self.emit1(Op::PlaceHeads { heads, head_dim: width, parts }, inputs, output)
    }
}
