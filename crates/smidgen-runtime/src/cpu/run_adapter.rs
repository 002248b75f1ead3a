//! The steps of DoRA and LS-LoRA on the CPU: turns operands into views and calls matmuls and row kernels.
//!
//! The matrix of DoRA's row norms is as large as a weight, and LS-LoRA's argument is as large as an activation. Only
//! some rows of either exist at a time, in the step's workspace or in the buffer of the result.

use super::decode_rows::decode_rows;
use super::fourier::FourierModule;
use super::isa::Isa;
use super::kernel::OutputView;
use super::matmul_terms::{Init, Output};
use super::run::Run;
use super::view::Dst;
use super::{columns, fourier};
use smidgen_ir::workspace_cpu::{self, FOURIER_ROWS};

impl Run<'_> {
    /// y = z·magnitude/norm + bias.
    pub(super) fn scale_columns(&self, bias: bool) {
        let (magnitude, norm) = (self.floats(self.input(1)), self.floats(self.input(2)));
        let bias = bias.then(|| self.decoded_vector(self.input(3)).src());
        columns::scale_columns(self.input_rows(0), magnitude, norm, bias, self.output_rows(0));
    }

    pub(super) fn magnitude_grad(&self) {
        let norm = self.floats(self.input(2));
        columns::magnitude_grad(
            self.input_rows(0),
            self.input_rows(1),
            norm,
            self.floats_mut(self.update(0)),
        );
    }

    /// norms[i] = |W_i + scale·B_i·A|, some rows at a time.
    pub(super) fn row_norms(&self, scale: f32) {
        let (weight, b, norms) = (self.input(0), self.input(2), self.floats_mut(self.update(0)));
        let (n, k) = (self.rows_of(weight), weight.columns);
        let block = workspace_cpu::norm_block_rows(n, k);
        let used = workspace_cpu::aligned_floats(block * k);
        for first in (0..n).step_by(block) {
            let rows = block.min(n - first);
            let sum = self.workspace_floats().part(0, rows * k);
            // SAFETY: the weight is a view of planned memory, and the instruction set was detected.
            unsafe { decode_rows(Isa::detect(), self.matrix(weight), first, sum) };
            let mut term = self.plain_term(b, self.input(1), scale);
            term.left.pointer = self.row_address(b, first);
            let view = OutputView { pointer: sum.address(), row_stride: k, column_stride: 1 };
            self.f32_matmul(&[term], Init::Accumulate, Output { view, rows, columns: k }, used);
            columns::row_norms(sum.src().rows(k), norms.part(first, rows));
        }
    }

    /// y = base + φ(scale·h·Bᵀ), with the matmul for some rows at a time.
    pub(super) fn fourier(&self, scale: f32) {
        let (base, y) = (self.floats(self.input(0)), self.floats_mut(self.output(0)));
        let (all, n) = (self.rows_of(self.input(0)), self.input(0).columns);
        let block = FOURIER_ROWS.min(all).max(1);
        let used = workspace_cpu::aligned_floats(block * n);
        let module = self.fourier_module(3, scale);
        for first in (0..all).step_by(block) {
            let rows = block.min(all - first);
            let z = self.workspace_floats().part(0, rows * n);
            self.fourier_argument(1, first, rows, z, used);
            let (base, y) = (base.part(first * n, rows * n), y.part(first * n, rows * n));
            fourier::fourier(base.rows(n), z.src().rows(n), module, y.rows(n));
        }
    }

    /// h·Bᵀ of rows `first..first + rows`, where h is input `input` and B the next input.
    fn fourier_argument(&self, input: usize, first: usize, rows: usize, z: Dst<f32>, used: usize) {
        let (h, b) = (self.input(input), self.input(input + 1));
        let mut term = self.transposed_term(h, b, 1.0);
        term.left.pointer = self.row_address(h, first);
        let columns = self.rows_of(b);
        let view = OutputView { pointer: z.address(), row_stride: columns, column_stride: 1 };
        self.matmul(&[term], Init::Overwrite, Output { view, rows, columns }, used);
    }

    /// The argument is computed in the buffer of its gradient.
    pub(super) fn fourier_grad(&self, scale: f32) {
        let dz = self.output_rows(0);
        let partials = workspace_cpu::fourier_partials(dz.rows(), dz.columns());
        let used = workspace_cpu::aligned_floats(2 * partials);
        self.fourier_argument(0, 0, dz.rows(), self.floats_mut(self.output(0)), used);
        let sums = self.workspace_doubles(partials);
        let module = self.fourier_module(2, scale);
        let (dcoefficients, dsigma) = (self.floats_mut(self.update(0)), self.floats_mut(self.update(1)));
        let z = self.floats(self.output(0)).rows(dz.columns());
        let dy = self.input_rows(4);
        fourier::fourier_grad(z, module, dy, dz, sums, dcoefficients, dsigma);
    }

    /// Coefficients and sigma, from input `first` on.
    fn fourier_module(&self, first: usize, scale: f32) -> FourierModule {
        let (coefficients, sigma) = (self.floats(self.input(first)), self.floats(self.input(first + 1)));
        FourierModule { coefficients, sigma, scale }
    }

    pub(super) fn fourier_reg(&self, weight: f64) {
        let coefficients = self.floats(self.input(0)).rows(4);
        let gradient = self.floats_mut(self.update(1)).rows(4);
        let loss = fourier::fourier_reg(coefficients, weight, self.loss_scale(self.input(1)), gradient);
        self.elements::<f64>(self.update(0)).set(0, loss);
    }
}
