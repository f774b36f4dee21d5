"use strict";
// Smoothing that does not lag: a line fitted around each point by weighted least squares (local
// linear regression; Cleveland 1979, Fan and Gijbels 1996), with tricube weights. The window is as
// wide at the ends as in the middle, shifted inwards; a straight line comes out as itself, also there.

// x ascending, y as long; width of the window in the units of x. At width 0: y itself.
function smooth(x, y, width) {
  const count = x.length;
  if (!(width > 0) || count < 3) return y;
  const out = new Array(count), start = x[0], end = x[count - 1];
  let low = 0, high = 0;
  for (let i = 0; i < count; i++) {
    const left = Math.max(start, Math.min(x[i] - width / 2, end - width)), right = left + width;
    while (x[low] < left) low++;
    while (high < count && x[high] <= right) high++;
    const reach = 1.000001 * Math.max(x[i] - left, right - x[i]);
    out[i] = fitted(x, y, low, high, x[i], reach);
  }
  return out;
}

// The value at `centre` of the line through the points from low to high.
function fitted(x, y, low, high, centre, reach) {
  let w0 = 0, w1 = 0, w2 = 0, y0 = 0, y1 = 0;
  for (let j = low; j < high; j++) {
    const d = (x[j] - centre) / reach, near = 1 - Math.abs(d * d * d), w = near * near * near;
    w0 += w; w1 += w * d; w2 += w * d * d; y0 += w * y[j]; y1 += w * d * y[j];
  }
  const spread = w0 * w2 - w1 * w1;
  return spread > 1e-9 * w0 * w0 ? (w2 * y0 - w1 * y1) / spread : y0 / w0;
}
